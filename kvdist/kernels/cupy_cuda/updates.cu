// A sum of gradients, scaled and clipped, with the rule of an optimizer, in one pass.
//
// Bytes an element of float32 for n gradients: 4·n + 8 for sgd, 4·n + 16 with one state, 4·n + 24 with two. For halves:
// 2·n + 4, and 8 more for each state and for a master.

enum Rule { SGD, SGD_MOMENTUM, NAG, ADAM, ADAMW, ADAGRAD };

#define NUMBERS_MAX 7

template <class W> struct Numbers { W n[NUMBERS_MAX]; };

static __device__ constexpr int states_of(int rule) { return rule == SGD ? 0 : rule == ADAM || rule == ADAMW ? 2 : 1; }

// Cut to ±limit; NaN stays NaN.
template <class W> INLINE W limited(W value, W limit) {
    value = value < -limit ? -limit : value;
    return value > limit ? limit : value;
}

INLINE float root(float value) { return sqrtf(value); }
INLINE double root(double value) { return sqrt(value); }

template <class W> INLINE W decayed(W value, W weight, W wd) { return wd != 0 ? value + weight * wd : value; }

// The new weight. Numbers: lr, wd, and momentum (sgd_momentum, nag) or epsilon (adagrad).
template <int RULE, class W> INLINE W plain_step(W weight, W grad, W& state, const Numbers<W>& numbers) {
    grad = decayed(grad, weight, numbers.n[1]);
    if constexpr (RULE == ADAGRAD) {
        state = state + grad * grad;
        return weight - grad / (root(state) + numbers.n[2]) * numbers.n[0];
    }
    W step = grad * numbers.n[0];
    if constexpr (RULE == SGD) return weight - step;
    state = state * numbers.n[2] - step;
    if constexpr (RULE == NAG) return weight + (state * numbers.n[2] - step);
    return weight + state;
}

// The new weight of adam and adamw. Numbers: rate, wd, β1, 1 - β1, β2, 1 - β2, ε.
template <int RULE, class W> INLINE W adam_step(W weight, W grad, W& mean, W& variance, const Numbers<W>& numbers) {
    if (RULE == ADAM) grad = decayed(grad, weight, numbers.n[1]);
    mean = mean * numbers.n[2] + grad * numbers.n[3];
    variance = variance * numbers.n[4] + grad * grad * numbers.n[5];
    W ratio = mean / (root(variance) + numbers.n[6]);
    if (RULE == ADAMW) ratio = decayed(ratio, weight, numbers.n[1]);
    return weight - ratio * numbers.n[0];
}

// The weight to start from: the master follows a stored weight that it does not round to, because that is newer.
template <class T, class W> INLINE W start_of(T weight, W master) {
    return Narrow<T>::of(master).bits == weight.bits ? master : widen(weight);
}

template <class T, class W> struct Update {
    T* out;
    const T* weight;
    W* master;
    W* first;
    W* second;
    i64 size;
    W factor;
    W limit;
    Numbers<W> numbers;
    int count;
    int aligned;
};

// Gradients are taken four at a time, with weight and states on their way too.
template <bool FAST, int RULE, class T, bool MASTER, class W>
INLINE void update_tile(const Update<T, W>& call, const Terms<W>& terms, const Term<W>* more) {
    const int N = 16 / sizeof(T), STATES = states_of(RULE);
    i64 start = pack_start(0, 1, N), left = call.size - start;
    if (left <= 0) return;
    Pack<T, N> weight;
    Pack<W, N> master, first, second;
    load<FAST>(weight, call.weight + start, left);
    if constexpr (MASTER) load<FAST>(master, call.master + start, left);
    if constexpr (STATES >= 1) load<FAST>(first, call.first + start, left);
    if constexpr (STATES >= 2) load<FAST>(second, call.second + start, left);
    W total[1][N];
#pragma unroll
    for (int i = 0; i < N; i++) total[0][i] = 0;
    add_terms<FAST, 4, 1, T, N, W>(total, terms, more, call.count, call.size);
#pragma unroll
    for (int i = 0; i < N; i++) {
        W grad = limited(total[0][i] * call.factor, call.limit), old, fresh;
        if constexpr (MASTER) old = start_of(weight.item[i], master.item[i]);
        else old = widen(weight.item[i]);
        if constexpr (STATES == 2) fresh = adam_step<RULE>(old, grad, first.item[i], second.item[i], call.numbers);
        else fresh = plain_step<RULE>(old, grad, first.item[i], call.numbers);
        if constexpr (MASTER) master.item[i] = fresh;
        weight.item[i] = Narrow<T>::of(fresh);
    }
    if constexpr (STATES >= 1) store<FAST>(first, call.first + start, left);
    if constexpr (STATES >= 2) store<FAST>(second, call.second + start, left);
    if constexpr (MASTER) store<FAST>(master, call.master + start, left);
    store<FAST>(weight, call.out + start, left);
}

template <int RULE, class T, bool MASTER>
KERNEL update(
    const __grid_constant__ Update<T, typename Wide<T>::type> call,
    const __grid_constant__ Terms<typename Wide<T>::type> terms, const Term<typename Wide<T>::type>* more
) {
    if (call.aligned && whole_tile(call.size, 1, 16 / sizeof(T))) update_tile<true, RULE, T, MASTER>(call, terms, more);
    else update_tile<false, RULE, T, MASTER>(call, terms, more);
}
