// Headers that include this one are compiled with the flags of every instruction set, and a linker keeps only one of
// several equal functions. A function that is not inlined could be kept with instructions that the processor lacks, so
// all of theirs are inlined.
#pragma once

#define FORERUN_INLINE inline __attribute__((always_inline))
