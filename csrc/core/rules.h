// The rule that bind/rule.cpp, cpu/rule.cpp and cuda/rule.cu are compiled for: the header in core/rules
// that is named like its op, TW_RULE.
//
// The header's TW_RULE_TYPES lists a type that steps for each number of moments and, for an adaptive
// rule, the types whose directions are measured.
#pragma once

#define TW_QUOTE_(text) #text
#define TW_QUOTE(text) TW_QUOTE_(text)
#define TW_RULE_NAME TW_QUOTE(TW_RULE)
// clang-format off: spaces would be a part of the path
#include TW_QUOTE(rules/TW_RULE.h)
// clang-format on

// Ignores the types of a list that a file does not use.
#define TW_NOTHING(Type)
