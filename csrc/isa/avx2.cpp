#define FORERUN_ISA avx2
#include "kernels.inc"
