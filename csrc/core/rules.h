// The rules that step each element independently. bind/rule.cpp, cpu/rule.cpp and cuda/rule.cu are
// compiled once for each rule, with TW_RULE defined as the name of its op.
//
// A new rule needs a header, core/<op>.h, and a line here. The line names a type that steps for each
// number of moments, and, for an adaptive rule, the types whose directions are measured.
#pragma once

#define TW_RULE_adam(Step, Measure) Step(Adam) Step(Amsgrad) Measure(Adam) Measure(Amsgrad)
#define TW_RULE_ademamix(Step, Measure) Step(Ademamix)
#define TW_RULE_lamb(Step, Measure) Step(Lamb) Measure(Lamb)
#define TW_RULE_lion(Step, Measure) Step(Lion) Measure(Lion)
#define TW_RULE_muon(Step, Measure) Step(MuonMomentum) Step(MuonStep)
#define TW_RULE_schedule_free(Step, Measure) Step(ScheduleFree)
#define TW_RULE_sgd(Step, Measure) Step(Sgd) Step(MomentumSgd) Measure(Gradient)

// The name of the op that a file is compiled for, its line of the list, and its header, which is
// next to this one.
#define TW_QUOTE_(text) #text
#define TW_QUOTE(text) TW_QUOTE_(text)
#define TW_JOIN_(a, b) a##b
#define TW_JOIN(a, b) TW_JOIN_(a, b)
#define TW_RULE_NAME TW_QUOTE(TW_RULE)
#define TW_LINE_OF_RULE TW_JOIN(TW_RULE_, TW_RULE)
#include TW_QUOTE(TW_RULE.h)

// Ignores the types of a line that a file does not use.
#define TW_NOTHING(Type)
