#define FORERUN_ISA baseline
#include "kernels.inc"
