// Stand-ins with which a compiler of C++ takes the text of the kernels, and what runs a kernel over all its blocks.
//
// The threads of a block take turns. A kernel without barriers runs them one after the other; in one with barriers
// each has a stack of its own and gives way at a barrier until all have come to it.

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <ucontext.h>
#include <utility>
#include <vector>

#define __global__ static
#define __device__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(threads)
#define __grid_constant__
#define __shared__ static

struct Index { unsigned x, y, z; };
struct alignas(16) uint4 { unsigned x, y, z, w; };

template <class T> static inline T __ldg(const T* from) { return *from; }

static Index threadIdx, blockIdx, blockDim, gridDim;

static const unsigned HOST_THREADS = 256;
static const size_t STACK_BYTES = 64 * 1024;
static bool has_barriers;
static ucontext_t scheduler, threads[HOST_THREADS];
static bool done[HOST_THREADS];
static void (*body)(void*);
static void* body_arguments;

static void __syncthreads() {
    if (!has_barriers) abort();
    unsigned me = threadIdx.x;
    swapcontext(&threads[me], &scheduler);
    threadIdx.x = me;
}

static void thread_main() {
    body(body_arguments);
    done[threadIdx.x] = true;
    swapcontext(&threads[threadIdx.x], &scheduler);
}

static void run_block_with_barriers() {
    static std::vector<char> stacks(HOST_THREADS * STACK_BYTES);
    for (unsigned i = 0; i < HOST_THREADS; i++) {
        getcontext(&threads[i]);
        threads[i].uc_stack.ss_sp = &stacks[i * STACK_BYTES];
        threads[i].uc_stack.ss_size = STACK_BYTES;
        makecontext(&threads[i], thread_main, 0);
        done[i] = false;
    }
    // Each turn of this loop takes every thread to its next barrier, or to its end.
    for (unsigned left = HOST_THREADS; left;) {
        left = 0;
        for (unsigned i = 0; i < HOST_THREADS; i++) {
            if (done[i]) continue;
            threadIdx.x = i;
            swapcontext(&scheduler, &threads[i]);
            left += !done[i];
        }
    }
}

template <class... A> struct Call {
    void (*kernel)(A...);
    void** arguments;
    template <size_t... I> void go(std::index_sequence<I...>) { kernel(*static_cast<std::decay_t<A>*>(arguments[I])...); }
    static void run(void* self) { static_cast<Call*>(self)->go(std::index_sequence_for<A...>()); }
};

template <class... A>
static void run_kernel(void (*kernel)(A...), unsigned blocks, void** arguments, bool barriers) {
    Call<A...> call = {kernel, arguments};
    body = Call<A...>::run;
    body_arguments = &call;
    has_barriers = barriers;
    blockDim = {HOST_THREADS, 1, 1};
    gridDim = {blocks, 1, 1};
    for (unsigned block = 0; block < blocks; block++) {
        blockIdx = {block, 0, 0};
        if (barriers) run_block_with_barriers();
        else for (threadIdx = {0, 0, 0}; threadIdx.x < HOST_THREADS; threadIdx.x++) body(body_arguments);
    }
}
