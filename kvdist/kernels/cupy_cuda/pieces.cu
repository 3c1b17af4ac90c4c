// Many arrays of very different sizes in one launch: every block has one chunk of one of them.

#define CHUNK_BYTES 16384

// `first` is the number of the array's first chunk; arrays without elements are not in the table.
struct Piece {
    u64 from;
    u64 to;
    i64 bytes;
    i64 first;
};

// The piece that this block has a chunk of: the last one that begins at or before it.
INLINE Piece piece_of(const Piece* pieces, int count) {
    int low = 0, high = count - 1;
    while (low < high) {
        int middle = (low + high + 1) / 2;
        if (pieces[middle].first <= (i64)blockIdx.x) low = middle;
        else high = middle - 1;
    }
    return pieces[low];
}

// A chunk in units of V: four a thread are on their way at a time.
template <class V> INLINE void copy_units(const V* from, V* to, i64 units) {
    for (i64 first = threadIdx.x; first < units; first += 4 * THREADS) {
        V unit[4];
#pragma unroll
        for (int k = 0; k < 4; k++)
            if (first + k * THREADS < units) unit[k] = __ldg(from + first + k * THREADS);
#pragma unroll
        for (int k = 0; k < 4; k++)
            if (first + k * THREADS < units) to[first + k * THREADS] = unit[k];
    }
}

template <class V> INLINE void copy_as(u64 from, u64 to, i64 bytes) {
    i64 units = bytes / (i64)sizeof(V), done = units * (i64)sizeof(V);
    copy_units((const V*)from, (V*)to, units);
    copy_units((const u8*)(from + done), (u8*)(to + done), bytes - done);
}

// Bytes an element: twice its size.
KERNEL copy_pieces(const Piece* pieces, int count) {
    Piece piece = piece_of(pieces, count);
    i64 start = ((i64)blockIdx.x - piece.first) * CHUNK_BYTES;
    i64 bytes = piece.bytes - start < CHUNK_BYTES ? piece.bytes - start : CHUNK_BYTES;
    u64 from = piece.from + start, to = piece.to + start, both = from | to;
    if (both % 16 == 0) copy_as<uint4>(from, to, bytes);
    else if (both % 4 == 0) copy_as<u32>(from, to, bytes);
    else if (both % 2 == 0) copy_as<u16>(from, to, bytes);
    else copy_as<u8>(from, to, bytes);
}

// Infinity and NaN have all bits of the exponent. U is an unsigned type as wide as the elements.
template <class U> INLINE bool is_finite(U bits, U exponent) { return (bits & exponent) != exponent; }

// Sets `found` where an element is not finite; nothing is written otherwise. Bytes an element: its size.
template <class U> KERNEL find_not_finite(const Piece* pieces, int count, U exponent, u32* found) {
    const int N = 16 / sizeof(U);
    Piece piece = piece_of(pieces, count);
    i64 start = ((i64)blockIdx.x - piece.first) * CHUNK_BYTES;
    i64 size = (piece.bytes - start < CHUNK_BYTES ? piece.bytes - start : CHUNK_BYTES) / (i64)sizeof(U);
    const U* values = (const U*)(piece.from + start);
    bool bad = false;
    Pack<U, N> pack[CHUNK_BYTES / 16 / THREADS];
#pragma unroll
    for (int turn = 0; turn < CHUNK_BYTES / 16 / THREADS; turn++) {
        i64 first = (i64)(turn * THREADS + (int)threadIdx.x) * N;
        load<false, true>(pack[turn], values + first, size - first);  // what is beyond the end is 0
    }
#pragma unroll
    for (int turn = 0; turn < CHUNK_BYTES / 16 / THREADS; turn++) {
#pragma unroll
        for (int i = 0; i < N; i++) bad = bad || !is_finite<U>(pack[turn].item[i], exponent);
    }
    if (bad) *found = 1;
}
