#define FORERUN_ISA avx512
#include "kernels.inc"
