// rank: 2
// processors: x86_64 amd64
// needs: avx2 fma f16c avxvnni
#define FORERUN_ISA avx_vnni
#include "../simd/byte_fours.h"
#include "../simd/avx2_tiles.h"
#include "kernels.inc"
