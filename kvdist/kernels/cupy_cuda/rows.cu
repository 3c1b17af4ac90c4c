// Rows of a table. 2^lanes neighbouring threads share a row, so that no thread divides.

#define ROW_TURNS 4

INLINE i64 row_of(int turn, int lanes) {
    int rows = THREADS >> lanes;
    return ((i64)blockIdx.x * ROW_TURNS + turn) * rows + (threadIdx.x >> lanes);
}

INLINE i64 lane_of(int lanes) { return threadIdx.x & ((1 << lanes) - 1); }

// table[indices[i]] += rows[i]; no index comes twice. Bytes an element: thrice its size; 8 for each row.
template <class T>
KERNEL add_rows(T* table, const i64* indices, const T* rows, i64 count, i64 length, int lanes) {
    const int N = 16 / sizeof(T);
    for (int turn = 0; turn < ROW_TURNS; turn++) {
        i64 row = row_of(turn, lanes);
        if (row >= count) return;
        T* target = table + indices[row] * length;
        const T* source = rows + row * length;
        for (i64 start = lane_of(lanes) * N; start < length; start += (i64)N << lanes) {
            Pack<T, N> sum, more;
            load<false>(sum, target + start, length - start);
            load<false>(more, source + start, length - start);
#pragma unroll
            for (int i = 0; i < N; i++) sum.item[i] = Narrow<T>::of(widen(sum.item[i]) + widen(more.item[i]));
            store<false>(sum, target + start, length - start);
        }
    }
}

// out[g] = Σ rows[order[k]] for starts[g] <= k < starts[g + 1], in that order. Halves are rounded once; a row that is
// alone is copied. Bytes an element of the rows: its size; of the sums: its size; 16 for each row.
template <class T>
KERNEL sum_groups(
    const T* rows, const i64* order, const i64* starts, T* out, i64 groups, i64 count, i64 length, int lanes
) {
    typedef typename Wide<T>::type W;
    const int N = 16 / sizeof(T);
    for (int turn = 0; turn < ROW_TURNS; turn++) {
        i64 group = row_of(turn, lanes);
        if (group >= groups) return;
        i64 begin = starts[group], end = group + 1 < groups ? starts[group + 1] : count;
        for (i64 start = lane_of(lanes) * N; start < length; start += (i64)N << lanes) {
            Pack<T, N> sum;
            load<false>(sum, rows + order[begin] * length + start, length - start);
            if (end - begin > 1) {
                W total[N];
#pragma unroll
                for (int i = 0; i < N; i++) total[i] = widen(sum.item[i]);
                for (i64 k = begin + 1; k < end; k++) {
                    Pack<T, N> more;
                    load<false>(more, rows + order[k] * length + start, length - start);
#pragma unroll
                    for (int i = 0; i < N; i++) total[i] = total[i] + widen(more.item[i]);
                }
#pragma unroll
                for (int i = 0; i < N; i++) sum.item[i] = Narrow<T>::of(total[i]);
            }
            store<false>(sum, out + group * length + start, length - start);
        }
    }
}
