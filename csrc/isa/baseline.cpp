// rank: 0
#define FORERUN_ISA baseline
#include "../simd/portable.h"
#include "../simd/float_tiles.h"
#include "kernels.inc"
