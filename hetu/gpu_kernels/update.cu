// Update rules of optimizers: all parameters of a model in one launch, or the looked-up rows of one table.
//
// `update.py` puts a rule in front: `STATES`, `struct Scalars` with what the rule computes once per block from the rate
// and the step (in double, as beta^step needs it), and `apply(scalars, p, a, b, c, g)`, which changes a parameter and
// up to three states. If not `*ok` the old values stay. Bytes: parameter, gradient and states read once, parameter and states written once (Adam: 28 an
// element of float32); FLOP: up to 15 an element. One launch for many tensors as in NVIDIA Apex's multi_tensor_apply.

// A chunk of one tensor is a block of 256 threads. `table` has for every tensor the addresses of the new parameter and
// states, of the old ones, and of the gradient; `tensor` and `start` say where each chunk lies. Old and new may be equal.
extern "C" __global__ void update_all(S* const* table, const long long* sizes, const int* tensor, const long long* start,
                                      const R* rate, const N* step, const bool* ok, long long chunk) {
    __shared__ Scalars scalars;
    if (threadIdx.x == 0) scalars = prepare((double)*rate, (double)*step);
    __syncthreads();
    const Scalars s = scalars;
    const bool moves = *ok;
    S* const* row = table + (long long)tensor[blockIdx.x] * (2 * STATES + 3);
    S* const* old = row + STATES + 1;
    const S* gradient = old[STATES + 1];
    const long long size = sizes[tensor[blockIdx.x]], begin = start[blockIdx.x];
    const long long end = begin + chunk < size ? begin + chunk : size;
    for (long long i = begin + threadIdx.x; i < end; i += blockDim.x) {
        T v[4] = {0, 0, 0, 0};
        for (int k = 0; k <= STATES; k++) v[k] = old[k][i];
        if (moves) apply(s, v[0], v[1], v[2], v[3], (T)gradient[i]);
        for (int k = 0; k <= STATES; k++) row[k][i] = v[k];
    }
}

// Only the rows `ids` of a table (length, inner) and of its states. `order` sorts the ids; the warp at the first place
// of an id sums the gradients of all its places in that order and applies the rule once. Block (32, 8).
// Bytes: the gradient rows once, the touched rows of parameter and states twice.
extern "C" __global__ void update_rows(S* p, S* a, S* b, S* c, const I* ids, const S* rows, const long long* order,
                                       const R* rate, const N* step, long long count, long long length, long long inner) {
    __shared__ Scalars scalars;
    if (threadIdx.x == 0 && threadIdx.y == 0) scalars = prepare((double)*rate, (double)*step);
    __syncthreads();
    const Scalars s = scalars;
    const long long place = (long long)blockIdx.x * blockDim.y + threadIdx.y;
    if (place >= count) return;
    const I id = ids[order[place]];
    if ((place > 0 && ids[order[place - 1]] == id) || (long long)id < 0 || (long long)id >= length) return;
    const long long end = end_of_run(ids, order, place, count);
    for (long long k = threadIdx.x; k < inner; k += 32) {
        T sum = 0;
#pragma unroll 8
        for (long long q = place; q < end; q++) sum += (T)rows[order[q] * inner + k];
        const long long i = (long long)id * inner + k;
        T v[4] = {(T)p[i], STATES > 0 ? (T)a[i] : (T)0, STATES > 1 ? (T)b[i] : (T)0, STATES > 2 ? (T)c[i] : (T)0};
        apply(s, v[0], v[1], v[2], v[3], sum);
        p[i] = v[0];
        if (STATES > 0) a[i] = v[1];
        if (STATES > 1) b[i] = v[2];
        if (STATES > 2) c[i] = v[3];
    }
}

// Descent without states in one launch: the rows need neither order nor sums, only atomics.
extern "C" __global__ void descend_rows(T* p, const I* ids, const S* rows, const R* rate, long long n, long long length,
                                        long long inner_) {
    const T factor = (T)(double)*rate;
    const Index inner = inner_;
    FOR_ELEMENTS(n) {
        const long long id = ids[e / inner];
        if (id >= 0 && id < length) atomicAdd(&p[id * inner + e % inner], -factor * (T)rows[e]);
    }
}
