// Symbols that newer compilers' headers expect in libstdc++: these libraries run with gcc 8's.
#include <new>
#include <sstream>

template class std::basic_stringstream<char>;
template class std::basic_ostringstream<char>;

namespace std {

void __throw_bad_array_new_length() { throw std::bad_alloc(); }

}  // namespace std
