// What all kernels share: element types, casts of halves, 16-byte packs, and how a tile is cut into packs.
//
// Rules that hold in all these files:
// * Every operation is the NumPy reference's, in its order and type, so that the results are equal bit by bit (a NaN
//   stays a NaN). They are compiled with --fmad=false and without fast-math: IEEE division and square root, subnormals
//   kept. Integers are unsigned, because those wrap by definition.
// * No header is included: which ones lie beside NVRTC differs from machine to machine.
// * An array may start at any element. Where all arrays of a call start at 16 bytes, and the tile is whole, the loads
//   are 16 bytes wide and unconditional; elsewhere each pack decides for itself.
// * A block of THREADS threads works on one tile. Neighbouring threads have neighbouring packs.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

// Halves are their bits.
struct f16 { u16 bits; };
struct bf16 { u16 bits; };

#define THREADS 256
#define KERNEL __global__ void __launch_bounds__(THREADS)
#define INLINE [[maybe_unused]] static __device__ __forceinline__

// The type in which elements are summed.
template <class T> struct Wide { typedef T type; };
template <> struct Wide<f16> { typedef float type; };
template <> struct Wide<bf16> { typedef float type; };

template <class T> struct IsInteger { static const bool value = false; };
template <> struct IsInteger<u8> { static const bool value = true; };
template <> struct IsInteger<u32> { static const bool value = true; };
template <> struct IsInteger<u64> { static const bool value = true; };

// Casts of halves.

union Bits32 { float number; u32 bits; };

INLINE u32 bits_of(float number) { Bits32 both; both.number = number; return both.bits; }
INLINE float number_of(u32 bits) { Bits32 both; both.bits = bits; return both.number; }

#ifdef __CUDA_ARCH__
// One instruction each; written out they would cost as much time as the memory does.
INLINE float from_f16(f16 half) {
    float number;
    asm("cvt.f32.f16 %0, %1;" : "=f"(number) : "h"(half.bits));
    return number;
}
INLINE f16 to_f16(float number) {
    f16 half;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half.bits) : "f"(number));
    return half;
}
#else
INLINE float from_f16(f16 half) {
    u32 shifted = (u32)(half.bits & 0x7FFF) << 13;
    // Multiplied by 2^112 the exponent is right, of small numbers too; infinity and NaN get theirs back.
    u32 size = bits_of(number_of(shifted) * number_of(239u << 23));
    if (shifted >= 0x7C00u << 13) size |= 0x7F800000u;
    return number_of(size | (u32)(half.bits & 0x8000) << 16);
}
INLINE f16 to_f16(float number) {
    u32 bits = bits_of(number), sign = bits & 0x80000000u, size = bits ^ sign, magic = 126u << 23, half;
    if (size >= 143u << 23) half = size > 0x7F800000u ? 0x7E00u : 0x7C00u;
    else if (size < 113u << 23) half = bits_of(number_of(size) + number_of(magic)) - magic;  // the adder rounds it
    else half = (size + 0xC8000FFFu + (size >> 13 & 1u)) >> 13;
    f16 result;
    result.bits = (u16)(half | sign >> 16);
    return result;
}
#endif

// Ties go to even; the addition would carry a NaN to infinity or to zero, so NaNs are cut and kept quiet.
INLINE bf16 to_bf16(float number) {
    u32 bits = bits_of(number);
    u32 kept = number != number ? bits >> 16 | 0x40u : (bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16;
    bf16 result;
    result.bits = (u16)kept;
    return result;
}

template <class T> INLINE T widen(T value) { return value; }
INLINE float widen(f16 value) { return from_f16(value); }
INLINE float widen(bf16 value) { return number_of((u32)value.bits << 16); }

// Narrow<T>::of is the opposite: one rounding.
template <class T> struct Narrow {
    static __device__ __forceinline__ T of(T value) { return value; }
};
template <> struct Narrow<f16> {
    static __device__ __forceinline__ f16 of(float value) { return to_f16(value); }
};
template <> struct Narrow<bf16> {
    static __device__ __forceinline__ bf16 of(float value) { return to_bf16(value); }
};

// Packs: N neighbouring elements of a whole number of 16 bytes.

template <class T, int N> union Pack {
    T item[N];
    uint4 raw[sizeof(T) * N / 16];
};

INLINE bool at_16(const void* address) { return (u64)address % 16 == 0; }

// The first `count` of N elements, the rest zero; FAST promises that there are N, at 16 bytes. SOURCE is for arrays that
// nobody writes: their addresses may come out of tables, where only this load is known to be one of global memory.
template <bool FAST, bool SOURCE = false, class T, int N> INLINE void load(Pack<T, N>& pack, const T* from, i64 count) {
    if (FAST || (count >= N && at_16(from))) {
#pragma unroll
        for (int i = 0; i < (int)(sizeof(T) * N / 16); i++) {
            const uint4* address = reinterpret_cast<const uint4*>(from) + i;
            pack.raw[i] = SOURCE ? __ldg(address) : *address;
        }
    } else {
#pragma unroll
        for (int i = 0; i < N; i++)
            if (i < count) pack.item[i] = from[i];
            else pack.item[i] = T();
    }
}

template <bool FAST, class T, int N> INLINE void store(const Pack<T, N>& pack, T* to, i64 count) {
    if (FAST || (count >= N && at_16(to))) {
#pragma unroll
        for (int i = 0; i < (int)(sizeof(T) * N / 16); i++) reinterpret_cast<uint4*>(to)[i] = pack.raw[i];
    } else {
#pragma unroll
        for (int i = 0; i < N; i++)
            if (i < count) to[i] = pack.item[i];
    }
}

// The first element of the pack that this thread has as its `turn`-th in a tile of `turns` packs a thread.
INLINE i64 pack_start(int turn, int turns, int pack_elements) {
    return ((i64)blockIdx.x * (THREADS * turns) + turn * THREADS + threadIdx.x) * pack_elements;
}

INLINE bool whole_tile(i64 size, int turns, int pack_elements) {
    return ((i64)blockIdx.x + 1) * (THREADS * turns * pack_elements) <= size;
}

// What is summed: up to TERMS_MAX arrays are named in the arguments of a kernel, the rest in the memory of the device.

#define TERMS_MAX 32

template <class W> struct alignas(16) Term {
    u64 source;
    W scale;
};

template <class W> struct Terms { Term<W> term[TERMS_MAX]; };

template <class W> INLINE Term<W> term_of(const Terms<W>& terms, const Term<W>* more, int i) {
    return i < TERMS_MAX ? terms.term[i] : more[i - TERMS_MAX];
}

template <class W> INLINE W scaled(W value, W scale) {
    if constexpr (IsInteger<W>::value) return value;
    else return value * scale;  // by 1 it changes no bit
}

// Adds terms to TURNS packs of sums, BATCH terms at a time: BATCH · TURNS loads are on their way before the first sum.
template <bool FAST, int BATCH, int TURNS, class T, int N, class W>
INLINE void add_terms(W (&total)[TURNS][N], const Terms<W>& terms, const Term<W>* more, int count, i64 size) {
    for (int first = 0; first < count; first += BATCH) {
        Pack<T, N> pack[BATCH][TURNS];
        W scale[BATCH];
#pragma unroll
        for (int k = 0; k < BATCH; k++) {
            if (first + k < count) {
                Term<W> term = term_of(terms, more, first + k);
                scale[k] = term.scale;
#pragma unroll
                for (int turn = 0; turn < TURNS; turn++) {
                    i64 start = pack_start(turn, TURNS, N);
                    load<FAST, true>(pack[k][turn], (const T*)term.source + start, size - start);
                }
            }
        }
#pragma unroll
        for (int k = 0; k < BATCH; k++) {
            if (first + k < count) {
#pragma unroll
                for (int turn = 0; turn < TURNS; turn++) {
#pragma unroll
                    for (int i = 0; i < N; i++) {
                        W value = scaled<W>(widen(pack[k][turn].item[i]), scale[k]);
                        total[turn][i] = first + k ? (W)(total[turn][i] + value) : value;
                    }
                }
            }
        }
    }
}
