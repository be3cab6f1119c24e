// rank: 3
// processors: x86_64 amd64
// needs: avx512f avx512bw avx512dq avx512vl avx512vnni avx512bf16
// flags: -mamx-tile -mamx-int8 -mavx2 -mfma -mf16c -mprefer-vector-width=512 -Wno-uninitialized -Wno-maybe-uninitialized
#define FORERUN_ISA avx512
#include "../simd/avx512.h"
#include "../simd/avx512_tiles.h"
#include "../byte_tiles.h"
#include "kernels.inc"
