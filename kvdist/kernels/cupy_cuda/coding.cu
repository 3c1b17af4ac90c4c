// float32 to halves, two bits and one bit an element, with what is lost kept for the next time; and back.

#define CODE_TURNS 4
#define ROUND_ELEMENTS 8

template <class T> struct Infinity;
template <> struct Infinity<f16> { static const u16 bits = 0x7C00; };
template <> struct Infinity<bf16> { static const u16 bits = 0x7F80; };

template <class T> INLINE T rounded(float value, float& rest) {
    T half = Narrow<T>::of(value);
    bool finite = (bits_of(value) & 0x7FFFFFFFu) < 0x7F800000u;
    if (finite && (half.bits & 0x7FFF) == Infinity<T>::bits) half.bits -= 1;  // the largest stands before infinity
    rest = finite ? value - widen(half) : 0.0f;
    return half;
}

// Bytes an element: 14.
template <bool FAST, class T> INLINE void round_tile(const float* grad, float* residual, T* out, i64 size) {
    i64 start = pack_start(0, 1, ROUND_ELEMENTS), left = size - start;
    if (left <= 0) return;
    Pack<float, ROUND_ELEMENTS> fresh, rest;
    Pack<T, ROUND_ELEMENTS> half;
    load<FAST>(fresh, grad + start, left);
    load<FAST>(rest, residual + start, left);
#pragma unroll
    for (int i = 0; i < ROUND_ELEMENTS; i++) half.item[i] = rounded<T>(rest.item[i] + fresh.item[i], rest.item[i]);
    store<FAST>(rest, residual + start, left);
    store<FAST>(half, out + start, left);
}

template <class T> KERNEL round_to_half(const float* grad, float* residual, T* out, i64 size, int aligned) {
    if (aligned && whole_tile(size, 1, ROUND_ELEMENTS)) round_tile<true>(grad, residual, out, size);
    else round_tile<false>(grad, residual, out, size);
}

// The code of one element, of BITS bits, and what it leaves in the residual.
template <int BITS> INLINE u32 code_of(float value, float limit, float& rest) {
    if constexpr (BITS == 2) {
        bool above = value >= limit, below = value <= -limit;
        // A zero that is taken away changes no bit.
        rest = value - limit * (float)((int)above - (int)below);
        return (above ? 3u : 0u) | (below ? 2u : 0u);
    } else {
        bool above = value > limit;
        rest = value - (above ? 1.0f : -1.0f);
        return above ? 1u : 0u;
    }
}

// A thread makes a whole byte: of four elements, or of eight. The first of them has the highest bits.
// Bytes an element: 12 and a quarter, or an eighth.
template <bool FAST, int BITS, int TURNS>
INLINE void quantise_tile(const float* grad, float* residual, float limit, u8* out, i64 size, i64 bytes) {
    const int N = 8 / BITS;
    Pack<float, N> fresh[TURNS], rest[TURNS];
#pragma unroll
    for (int turn = 0; turn < TURNS; turn++) {
        i64 start = pack_start(turn, TURNS, N);
        load<FAST>(fresh[turn], grad + start, size - start);
        load<FAST>(rest[turn], residual + start, size - start);
    }
#pragma unroll
    for (int turn = 0; turn < TURNS; turn++) {
        i64 start = pack_start(turn, TURNS, N);
        u32 codes = 0;
#pragma unroll
        for (int i = 0; i < N; i++) {
            u32 code = code_of<BITS>(rest[turn].item[i] + fresh[turn].item[i], limit, rest[turn].item[i]);
            if (FAST || i < size - start) codes |= code << (8 - BITS * (i + 1));
        }
        store<FAST>(rest[turn], residual + start, size - start);
        // The last word is filled with zeros.
        if (FAST || start / N < bytes) out[start / N] = (u8)codes;
    }
}

template <int BITS>
KERNEL quantise(const float* grad, float* residual, float limit, u8* out, i64 size, i64 bytes, int aligned) {
    const int TURNS = BITS == 2 ? 4 : 2;
    if (aligned && whole_tile(size, TURNS, 8 / BITS))
        quantise_tile<true, BITS, TURNS>(grad, residual, limit, out, size, bytes);
    else quantise_tile<false, BITS, TURNS>(grad, residual, limit, out, size, bytes);
}

template <int BITS> INLINE float worth_of(u32 code, float limit) {
    if constexpr (BITS == 2) return code == 3 ? limit : code == 2 ? -limit : 0.0f;
    else return code ? 1.0f : -1.0f;
}

// A thread has four elements: a byte of two bits each, or half of one. ADD adds to what is there.
// Bytes an element: 4 and a quarter, or an eighth; 4 more with ADD.
template <bool FAST, int BITS, bool ADD> INLINE void worth_tile(const u8* data, float limit, float* out, i64 size) {
    Pack<float, 4> total[CODE_TURNS];
    u32 codes[CODE_TURNS];
#pragma unroll
    for (int turn = 0; turn < CODE_TURNS; turn++) {
        i64 start = pack_start(turn, CODE_TURNS, 4);
        codes[turn] = FAST || start < size ? data[start * BITS / 8] : 0;
        if constexpr (ADD) load<FAST>(total[turn], out + start, size - start);
    }
#pragma unroll
    for (int turn = 0; turn < CODE_TURNS; turn++) {
        i64 start = pack_start(turn, CODE_TURNS, 4);
        int first = (int)(start * BITS % 8);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            u32 code = codes[turn] >> (8 - BITS * (i + 1) - first) & ((1u << BITS) - 1);
            float worth = worth_of<BITS>(code, limit);
            total[turn].item[i] = ADD ? total[turn].item[i] + worth : worth;
        }
        store<FAST>(total[turn], out + start, size - start);
    }
}

template <int BITS, bool ADD>
KERNEL dequantise(const u8* data, float limit, float* out, i64 size, int aligned) {
    if (aligned && whole_tile(size, CODE_TURNS, 4)) worth_tile<true, BITS, ADD>(data, limit, out, size);
    else worth_tile<false, BITS, ADD>(data, limit, out, size);
}
