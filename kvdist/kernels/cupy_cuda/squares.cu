// The sum of squares in float64, in two stages whose order depends on nothing but the length: it is repeatable.

#define SQUARE_TURNS 4

// The sum of all threads' numbers, in the first thread.
INLINE double block_sum(double own) {
    __shared__ double sums[THREADS];
    sums[threadIdx.x] = own;
    __syncthreads();
    for (int half = THREADS / 2; half > 0; half /= 2) {
        if ((int)threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
        __syncthreads();
    }
    return sums[0];
}

template <bool FAST, class T> INLINE double square_tile(const T* values, i64 tile, i64 size) {
    const int N = 16 / sizeof(T);
    Pack<T, N> pack[SQUARE_TURNS];
    double total = 0;
#pragma unroll
    for (int turn = 0; turn < SQUARE_TURNS; turn++) {
        i64 start = ((tile * SQUARE_TURNS + turn) * THREADS + threadIdx.x) * N;
        load<FAST>(pack[turn], values + start, size - start);  // what is beyond the end is 0
    }
#pragma unroll
    for (int turn = 0; turn < SQUARE_TURNS; turn++) {
#pragma unroll
        for (int i = 0; i < N; i++) {
            double value = widen(pack[turn].item[i]);
            total += value * value;
        }
    }
    return total;
}

// One number a block. Bytes an element: its size.
template <class T> KERNEL squares(const T* values, i64 size, double* partial, int aligned) {
    const i64 tile_elements = (i64)SQUARE_TURNS * THREADS * (16 / sizeof(T));
    double total = 0;
    for (i64 tile = blockIdx.x; tile * tile_elements < size; tile += gridDim.x)
        total += aligned && (tile + 1) * tile_elements <= size ? square_tile<true>(values, tile, size)
                                                               : square_tile<false>(values, tile, size);
    total = block_sum(total);
    if (threadIdx.x == 0) partial[blockIdx.x] = total;
}

// The second stage, of one block.
KERNEL add_partials(const double* partial, int count, double* out) {
    double total = 0;
    for (int i = threadIdx.x; i < count; i += THREADS) total += partial[i];
    total = block_sum(total);
    if (threadIdx.x == 0) *out = total;
}
