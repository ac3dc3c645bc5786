// wgmma: D[64, N] += A[64, K] B[N, K]^T by one warpgroup, both operands in shared memory, K-major,
// 128-byte swizzle (PTX ISA 9.7.15). N is a multiple of 8 up to 256; K spans 32 bytes. And D[64, N]
// += A[64, 16] B[16, N], or A[64, 8] B[N, 8]^T of tf32, with A in registers. Of 8-bit integers N is
// 8, 24 or a multiple of 16, and D are integers.
//
// The assembler wants each accumulator register spelled out, so the operand lists are built by the
// preprocessor: REGS_n is the text "%0, ..., %n-1" and OUTS_n the matching constraints.
#pragma once

#include "ptx.cuh"

#if __CUDA_ARCH__ >= 900
namespace gtco::ptx {

// 9.7.15.5.1 matrix descriptor of a K-major tile with rows of ROW bytes (32, 64 or 128), `offset`
// bytes behind `address`: where, and the stride between groups of 8 rows, each in units of 16
// bytes; bits 62 and 63 say the swizzle of as many bytes. With a constant offset it is one addition
// to what a tile's products share, and if the assembler knows that the address is the same in all
// lanes (ptx::uniform), no thread's registers hold it: built anew for each product, of 20
// instructions, descriptors take longer than the product of a small tile.
template <int ROW = 128>
__device__ __forceinline__ u64 wgmma_descriptor(u32 address, u32 offset) {
  static_assert(ROW == 32 || ROW == 64 || ROW == 128, "a swizzle of as many bytes");
  constexpr u32 SWIZZLE = ROW == 128 ? 1 : ROW == 64 ? 2 : 3;
  const u32 low = (address >> 4) + (offset >> 4 | 1u << 16);
  return u64(low) | u64(ROW / 2 | SWIZZLE << 30) << 32;
}

// The same of a tile of 16 bits whose rows of 128 bytes are of K, 16 for a product, and hold 64 of
// its columns: the next 64 lie LEADING bytes on. A block's rank in its cluster stands in the upper
// bits of its addresses, where they would come to lie on LEADING's.
template <int LEADING>
__device__ __forceinline__ u64 rows_descriptor(u32 address, u32 offset) {
  static_assert(LEADING % 16 == 0 && LEADING >> 18 == 0, "14 bits of 16 bytes");
  const u32 low = (address % (1u << 18) >> 4) + (offset >> 4 | u32(LEADING / 16) << 16);
  return u64(low) | u64(64u | 1u << 30) << 32;
}

__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit_group() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Returns when at most PENDING groups are unfinished: for giving back what the others have read.
template <int PENDING>
__device__ __forceinline__ void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// The same before accumulators are read: they pass through, so that no access to them moves above
// the wait.
template <int PENDING, int COUNT>
__device__ __forceinline__ void wgmma_wait_group(float (&d)[COUNT]) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
#pragma unroll
  for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
template <int PENDING, int COUNT>
__device__ __forceinline__ void wgmma_wait_group(int (&d)[COUNT]) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
#pragma unroll
  for (int i = 0; i < COUNT; ++i) asm volatile("" : "+r"(d[i])::"memory");
}

// Scalar type of the operands: half_t, bf16_t, e4m3_t, signed char, or float read as tf32.
template <class T, int N>
struct Wgmma;

// The same with B of 16 bits in rows of K (`rows_descriptor`), N a multiple of 64.
template <class T, int N>
struct WgmmaOfRows;

// A lies in registers as mma.sync has it (each warp's 16 rows). B of 16 bits lies in rows of 128
// bytes, one for each of the 16 along K: its descriptor is the same, and N at most the 64 columns
// of a row. With K_MAJOR, and of tf32 always, it lies as above.
template <class T, int N, bool K_MAJOR = false>
struct WgmmaFromRegisters;

// clang-format off
#define REGS_4 "%0,%1,%2,%3"
#define REGS_8 REGS_4 ",%4,%5,%6,%7"
#define REGS_12 REGS_8 ",%8,%9,%10,%11"
#define REGS_16 REGS_12 ",%12,%13,%14,%15"
#define REGS_20 REGS_16 ",%16,%17,%18,%19"
#define REGS_24 REGS_20 ",%20,%21,%22,%23"
#define REGS_28 REGS_24 ",%24,%25,%26,%27"
#define REGS_32 REGS_28 ",%28,%29,%30,%31"
#define REGS_36 REGS_32 ",%32,%33,%34,%35"
#define REGS_40 REGS_36 ",%36,%37,%38,%39"
#define REGS_44 REGS_40 ",%40,%41,%42,%43"
#define REGS_48 REGS_44 ",%44,%45,%46,%47"
#define REGS_52 REGS_48 ",%48,%49,%50,%51"
#define REGS_56 REGS_52 ",%52,%53,%54,%55"
#define REGS_60 REGS_56 ",%56,%57,%58,%59"
#define REGS_64 REGS_60 ",%60,%61,%62,%63"
#define REGS_68 REGS_64 ",%64,%65,%66,%67"
#define REGS_72 REGS_68 ",%68,%69,%70,%71"
#define REGS_76 REGS_72 ",%72,%73,%74,%75"
#define REGS_80 REGS_76 ",%76,%77,%78,%79"
#define REGS_84 REGS_80 ",%80,%81,%82,%83"
#define REGS_88 REGS_84 ",%84,%85,%86,%87"
#define REGS_92 REGS_88 ",%88,%89,%90,%91"
#define REGS_96 REGS_92 ",%92,%93,%94,%95"
#define REGS_100 REGS_96 ",%96,%97,%98,%99"
#define REGS_104 REGS_100 ",%100,%101,%102,%103"
#define REGS_108 REGS_104 ",%104,%105,%106,%107"
#define REGS_112 REGS_108 ",%108,%109,%110,%111"
#define REGS_116 REGS_112 ",%112,%113,%114,%115"
#define REGS_120 REGS_116 ",%116,%117,%118,%119"
#define REGS_124 REGS_120 ",%120,%121,%122,%123"
#define REGS_128 REGS_124 ",%124,%125,%126,%127"
#define FLOATS(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define INTEGERS(i) "+r"(d[i]), "+r"(d[i + 1]), "+r"(d[i + 2]), "+r"(d[i + 3])
#define FOUR FLOATS
#define OUTS_4 FOUR(0)
#define OUTS_8 OUTS_4, FOUR(4)
#define OUTS_12 OUTS_8, FOUR(8)
#define OUTS_16 OUTS_12, FOUR(12)
#define OUTS_20 OUTS_16, FOUR(16)
#define OUTS_24 OUTS_20, FOUR(20)
#define OUTS_28 OUTS_24, FOUR(24)
#define OUTS_32 OUTS_28, FOUR(28)
#define OUTS_36 OUTS_32, FOUR(32)
#define OUTS_40 OUTS_36, FOUR(36)
#define OUTS_44 OUTS_40, FOUR(40)
#define OUTS_48 OUTS_44, FOUR(44)
#define OUTS_52 OUTS_48, FOUR(48)
#define OUTS_56 OUTS_52, FOUR(52)
#define OUTS_60 OUTS_56, FOUR(56)
#define OUTS_64 OUTS_60, FOUR(60)
#define OUTS_68 OUTS_64, FOUR(64)
#define OUTS_72 OUTS_68, FOUR(68)
#define OUTS_76 OUTS_72, FOUR(72)
#define OUTS_80 OUTS_76, FOUR(76)
#define OUTS_84 OUTS_80, FOUR(80)
#define OUTS_88 OUTS_84, FOUR(84)
#define OUTS_92 OUTS_88, FOUR(88)
#define OUTS_96 OUTS_92, FOUR(92)
#define OUTS_100 OUTS_96, FOUR(96)
#define OUTS_104 OUTS_100, FOUR(100)
#define OUTS_108 OUTS_104, FOUR(104)
#define OUTS_112 OUTS_108, FOUR(108)
#define OUTS_116 OUTS_112, FOUR(112)
#define OUTS_120 OUTS_116, FOUR(116)
#define OUTS_124 OUTS_120, FOUR(120)
#define OUTS_128 OUTS_124, FOUR(124)

// Operands after the COUNT accumulators: descriptors A and B, then whether D is added to.
#define WGMMA(OF, T, N, COUNT, A, B, S, SHAPE, TYPES, TAIL)                                        \
  template <>                                                                                      \
  struct OF<T, N> {                                                                                \
    static __device__ __forceinline__ void mma(float (&d)[COUNT], u64 a, u64 b, int accumulate) {  \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #S ", 0;\n"                                \
                   "wgmma.mma_async.sync.aligned.m64n" #N SHAPE ".f32." TYPES                      \
                   " {" REGS_##COUNT "}, %" #A ", %" #B ", p, 1, 1" TAIL ";\n}"                     \
                   : OUTS_##COUNT                                                                  \
                   : "l"(a), "l"(b), "r"(accumulate));                                             \
    }                                                                                              \
  };
#define WGMMA_ALL(N, COUNT, A, B, S)                                       \
  WGMMA(Wgmma, half_t, N, COUNT, A, B, S, "k16", "f16.f16", ", 0, 0")      \
  WGMMA(Wgmma, bf16_t, N, COUNT, A, B, S, "k16", "bf16.bf16", ", 0, 0")    \
  WGMMA(Wgmma, float, N, COUNT, A, B, S, "k8", "tf32.tf32", "")            \
  WGMMA(Wgmma, e4m3_t, N, COUNT, A, B, S, "k32", "e4m3.e4m3", "")
#define WGMMA_ROWS_OF_K(N, COUNT, A, B, S)                                     \
  WGMMA(WgmmaOfRows, half_t, N, COUNT, A, B, S, "k16", "f16.f16", ", 0, 1")    \
  WGMMA(WgmmaOfRows, bf16_t, N, COUNT, A, B, S, "k16", "bf16.bf16", ", 0, 1")

// Of integers, whose operands have no signs to change.
#define WGMMA_OF_INTEGERS(N, COUNT, A, B, S)                                                       \
  template <>                                                                                      \
  struct Wgmma<signed char, N> {                                                                   \
    static __device__ __forceinline__ void mma(int (&d)[COUNT], u64 a, u64 b, int accumulate) {    \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #S ", 0;\n"                                \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k32.s32.s8.s8"                          \
                   " {" REGS_##COUNT "}, %" #A ", %" #B ", p;\n}"                                  \
                   : OUTS_##COUNT                                                                  \
                   : "l"(a), "l"(b), "r"(accumulate));                                             \
    }                                                                                              \
  };

#define WGMMA_FROM_REGISTERS(T, N, MAJOR, COUNT, A0, A1, A2, A3, B, S, SHAPE, TYPES, TAIL)     \
  template <>                                                                                  \
  struct WgmmaFromRegisters<T, N, MAJOR> {                                                     \
    static __device__ __forceinline__ void mma(float (&d)[COUNT], const u32 (&a)[4], u64 b,    \
                                               int accumulate) {                               \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #S ", 0;\n"                            \
                   "wgmma.mma_async.sync.aligned.m64n" #N SHAPE ".f32." TYPES                  \
                   " {" REGS_##COUNT "}, {%" #A0 ", %" #A1 ", %" #A2 ", %" #A3 "}, %" #B       \
                   ", p, 1, 1" TAIL ";\n}"                                                     \
                   : OUTS_##COUNT                                                              \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));     \
    }                                                                                          \
  };
#define WGMMA_FROM_REGISTERS_ALL(N, MAJOR, COUNT, A0, A1, A2, A3, B, S, TAIL)                       \
  WGMMA_FROM_REGISTERS(half_t, N, MAJOR, COUNT, A0, A1, A2, A3, B, S, "k16", "f16.f16", TAIL)       \
  WGMMA_FROM_REGISTERS(bf16_t, N, MAJOR, COUNT, A0, A1, A2, A3, B, S, "k16", "bf16.bf16", TAIL)
#define WGMMA_OF_ROWS(N, ...) WGMMA_FROM_REGISTERS_ALL(N, false, __VA_ARGS__, ", 1")
#define WGMMA_K_MAJOR(N, ...) WGMMA_FROM_REGISTERS_ALL(N, true, __VA_ARGS__, ", 0")
#define WGMMA_OF_TF32(N, COUNT, A0, A1, A2, A3, B, S) \
  WGMMA_FROM_REGISTERS(float, N, false, COUNT, A0, A1, A2, A3, B, S, "k8", "tf32.tf32", "")

WGMMA_OF_ROWS(16, 8, 8, 9, 10, 11, 12, 13)
WGMMA_OF_ROWS(32, 16, 16, 17, 18, 19, 20, 21)
WGMMA_OF_ROWS(48, 24, 24, 25, 26, 27, 28, 29)
WGMMA_OF_ROWS(64, 32, 32, 33, 34, 35, 36, 37)

WGMMA_K_MAJOR(16, 8, 8, 9, 10, 11, 12, 13)
WGMMA_K_MAJOR(32, 16, 16, 17, 18, 19, 20, 21)
WGMMA_K_MAJOR(64, 32, 32, 33, 34, 35, 36, 37)
WGMMA_K_MAJOR(96, 48, 48, 49, 50, 51, 52, 53)
WGMMA_K_MAJOR(128, 64, 64, 65, 66, 67, 68, 69)
WGMMA_K_MAJOR(160, 80, 80, 81, 82, 83, 84, 85)
WGMMA_K_MAJOR(192, 96, 96, 97, 98, 99, 100, 101)
WGMMA_K_MAJOR(224, 112, 112, 113, 114, 115, 116, 117)
WGMMA_K_MAJOR(256, 128, 128, 129, 130, 131, 132, 133)

WGMMA_OF_TF32(8, 4, 4, 5, 6, 7, 8, 9)
WGMMA_OF_TF32(16, 8, 8, 9, 10, 11, 12, 13)
WGMMA_OF_TF32(24, 12, 12, 13, 14, 15, 16, 17)
WGMMA_OF_TF32(32, 16, 16, 17, 18, 19, 20, 21)
WGMMA_OF_TF32(40, 20, 20, 21, 22, 23, 24, 25)
WGMMA_OF_TF32(48, 24, 24, 25, 26, 27, 28, 29)
WGMMA_OF_TF32(56, 28, 28, 29, 30, 31, 32, 33)
WGMMA_OF_TF32(64, 32, 32, 33, 34, 35, 36, 37)
WGMMA_OF_TF32(72, 36, 36, 37, 38, 39, 40, 41)
WGMMA_OF_TF32(80, 40, 40, 41, 42, 43, 44, 45)
WGMMA_OF_TF32(88, 44, 44, 45, 46, 47, 48, 49)
WGMMA_OF_TF32(96, 48, 48, 49, 50, 51, 52, 53)
WGMMA_OF_TF32(104, 52, 52, 53, 54, 55, 56, 57)
WGMMA_OF_TF32(112, 56, 56, 57, 58, 59, 60, 61)

WGMMA_ALL(8, 4, 4, 5, 6)
WGMMA_ALL(16, 8, 8, 9, 10)
WGMMA_ALL(24, 12, 12, 13, 14)
WGMMA_ALL(32, 16, 16, 17, 18)
WGMMA_ALL(40, 20, 20, 21, 22)
WGMMA_ALL(48, 24, 24, 25, 26)
WGMMA_ALL(56, 28, 28, 29, 30)
WGMMA_ALL(64, 32, 32, 33, 34)
WGMMA_ALL(72, 36, 36, 37, 38)
WGMMA_ALL(80, 40, 40, 41, 42)
WGMMA_ALL(88, 44, 44, 45, 46)
WGMMA_ALL(96, 48, 48, 49, 50)
WGMMA_ALL(104, 52, 52, 53, 54)
WGMMA_ALL(112, 56, 56, 57, 58)
WGMMA_ALL(120, 60, 60, 61, 62)
WGMMA_ALL(128, 64, 64, 65, 66)
WGMMA_ALL(136, 68, 68, 69, 70)
WGMMA_ALL(144, 72, 72, 73, 74)
WGMMA_ALL(152, 76, 76, 77, 78)
WGMMA_ALL(160, 80, 80, 81, 82)
WGMMA_ALL(168, 84, 84, 85, 86)
WGMMA_ALL(176, 88, 88, 89, 90)
WGMMA_ALL(184, 92, 92, 93, 94)
WGMMA_ALL(192, 96, 96, 97, 98)
WGMMA_ALL(200, 100, 100, 101, 102)
WGMMA_ALL(208, 104, 104, 105, 106)
WGMMA_ALL(216, 108, 108, 109, 110)
WGMMA_ALL(224, 112, 112, 113, 114)
WGMMA_ALL(232, 116, 116, 117, 118)
WGMMA_ALL(240, 120, 120, 121, 122)
WGMMA_ALL(248, 124, 124, 125, 126)
WGMMA_ALL(256, 128, 128, 129, 130)

WGMMA_ROWS_OF_K(64, 32, 32, 33, 34)
WGMMA_ROWS_OF_K(128, 64, 64, 65, 66)
WGMMA_ROWS_OF_K(192, 96, 96, 97, 98)
WGMMA_ROWS_OF_K(256, 128, 128, 129, 130)

#undef FOUR
#define FOUR INTEGERS
WGMMA_OF_INTEGERS(8, 4, 4, 5, 6)
WGMMA_OF_INTEGERS(16, 8, 8, 9, 10)
WGMMA_OF_INTEGERS(24, 12, 12, 13, 14)
WGMMA_OF_INTEGERS(32, 16, 16, 17, 18)
WGMMA_OF_INTEGERS(48, 24, 24, 25, 26)
WGMMA_OF_INTEGERS(64, 32, 32, 33, 34)
WGMMA_OF_INTEGERS(80, 40, 40, 41, 42)
WGMMA_OF_INTEGERS(96, 48, 48, 49, 50)
WGMMA_OF_INTEGERS(112, 56, 56, 57, 58)
WGMMA_OF_INTEGERS(128, 64, 64, 65, 66)
WGMMA_OF_INTEGERS(144, 72, 72, 73, 74)
WGMMA_OF_INTEGERS(160, 80, 80, 81, 82)
WGMMA_OF_INTEGERS(176, 88, 88, 89, 90)
WGMMA_OF_INTEGERS(192, 96, 96, 97, 98)
WGMMA_OF_INTEGERS(208, 104, 104, 105, 106)
WGMMA_OF_INTEGERS(224, 112, 112, 113, 114)
WGMMA_OF_INTEGERS(240, 120, 120, 121, 122)
WGMMA_OF_INTEGERS(256, 128, 128, 129, 130)

#undef REGS_4
#undef OUTS_4
#undef REGS_8
#undef OUTS_8
#undef REGS_12
#undef OUTS_12
#undef REGS_16
#undef OUTS_16
#undef REGS_20
#undef OUTS_20
#undef REGS_24
#undef OUTS_24
#undef REGS_28
#undef OUTS_28
#undef REGS_32
#undef OUTS_32
#undef REGS_36
#undef OUTS_36
#undef REGS_40
#undef OUTS_40
#undef REGS_44
#undef OUTS_44
#undef REGS_48
#undef OUTS_48
#undef REGS_52
#undef OUTS_52
#undef REGS_56
#undef OUTS_56
#undef REGS_60
#undef OUTS_60
#undef REGS_64
#undef OUTS_64
#undef REGS_68
#undef OUTS_68
#undef REGS_72
#undef OUTS_72
#undef REGS_76
#undef OUTS_76
#undef REGS_80
#undef OUTS_80
#undef REGS_84
#undef OUTS_84
#undef REGS_88
#undef OUTS_88
#undef REGS_92
#undef OUTS_92
#undef REGS_96
#undef OUTS_96
#undef REGS_100
#undef OUTS_100
#undef REGS_104
#undef OUTS_104
#undef REGS_108
#undef OUTS_108
#undef REGS_112
#undef OUTS_112
#undef REGS_116
#undef OUTS_116
#undef REGS_120
#undef OUTS_120
#undef REGS_124
#undef OUTS_124
#undef REGS_128
#undef OUTS_128
#undef FOUR
#undef WGMMA
#undef WGMMA_ALL
#undef WGMMA_ROWS_OF_K
#undef WGMMA_FROM_REGISTERS
#undef WGMMA_FROM_REGISTERS_ALL
#undef WGMMA_OF_TF32
#undef WGMMA_OF_INTEGERS
#undef FLOATS
#undef INTEGERS
// clang-format on

}  // namespace gtco::ptx
#endif
