// rank: 1
// processors: x86_64 amd64
// needs: avx2 fma f16c
#define FORERUN_ISA avx2
#include "../simd/byte_pairs.h"
#include "../simd/avx2_tiles.h"
#include "kernels.inc"
