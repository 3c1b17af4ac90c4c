// The weighted sum of any number of arrays, and casts.

// out = factor · Σ scale · source, in one pass. Bytes an element: size of the source's type for each source, and of
// the result's. For n arrays of float32: 4·n read, 4 written.
template <bool FAST, class T, class Out, int BATCH, int TURNS>
INLINE void sum_tile(
    Out* out, const Terms<typename Wide<T>::type>& terms, const Term<typename Wide<T>::type>* more, int count,
    typename Wide<T>::type factor, i64 size
) {
    typedef typename Wide<T>::type W;
    const int N = 16 / sizeof(T);
    W total[TURNS][N];
    add_terms<FAST, BATCH, TURNS, T, N, W>(total, terms, more, count, size);
#pragma unroll
    for (int turn = 0; turn < TURNS; turn++) {
        i64 start = pack_start(turn, TURNS, N);
        Pack<Out, N> result;
#pragma unroll
        for (int i = 0; i < N; i++) result.item[i] = Narrow<Out>::of(scaled<W>(total[turn][i], factor));
        store<FAST>(result, out + start, size - start);
    }
}

template <class T, class Out, int BATCH, int TURNS>
KERNEL weighted_sum(
    Out* out, const __grid_constant__ Terms<typename Wide<T>::type> terms, const Term<typename Wide<T>::type>* more,
    int count, typename Wide<T>::type factor, i64 size, int aligned
) {
    if (aligned && whole_tile(size, TURNS, 16 / sizeof(T)))
        sum_tile<true, T, Out, BATCH, TURNS>(out, terms, more, count, factor, size);
    else sum_tile<false, T, Out, BATCH, TURNS>(out, terms, more, count, factor, size);
}

#define CAST_TURNS 2
#define CAST_ELEMENTS 8

// Halves to float32 or back. Bytes an element: 6.
template <bool FAST, class In, class Out> INLINE void cast_tile(Out* out, const In* values, i64 size) {
    Pack<In, CAST_ELEMENTS> given[CAST_TURNS];
#pragma unroll
    for (int turn = 0; turn < CAST_TURNS; turn++) {
        i64 start = pack_start(turn, CAST_TURNS, CAST_ELEMENTS);
        load<FAST>(given[turn], values + start, size - start);
    }
#pragma unroll
    for (int turn = 0; turn < CAST_TURNS; turn++) {
        i64 start = pack_start(turn, CAST_TURNS, CAST_ELEMENTS);
        Pack<Out, CAST_ELEMENTS> result;
#pragma unroll
        for (int i = 0; i < CAST_ELEMENTS; i++) result.item[i] = Narrow<Out>::of(widen(given[turn].item[i]));
        store<FAST>(result, out + start, size - start);
    }
}

template <class In, class Out> KERNEL cast(Out* out, const In* values, i64 size, int aligned) {
    if (aligned && whole_tile(size, CAST_TURNS, CAST_ELEMENTS)) cast_tile<true>(out, values, size);
    else cast_tile<false>(out, values, size);
}
