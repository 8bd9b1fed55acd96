// What the headers of newer compilers expect of libstdc++: the libraries run with that of gcc 8.
#include <new>
#include <sstream>

template class std::basic_stringstream<char>;
template class std::basic_ostringstream<char>;

namespace std {

void __throw_bad_array_new_length() { throw std::bad_alloc(); }

}  // namespace std
