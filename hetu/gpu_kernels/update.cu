// Update rules of optimizers: all parameters of a model in one launch, or the looked-up rows of one table.
//
// `update.py` puts a rule in front: `STATES`, `struct Scalars` with what the rule computes once per block from the rate
// and the step (in double, as beta^step needs it), `apply(scalars, x, g)`, which changes a parameter and its states, and
// the parameter list `TABLES` with their names, `EACH_TABLE`. Bytes: parameter, gradient and states read once, parameter
// and states written once (Adam: 28 an element of float32, 26 where the gradient has 16 bits); FLOP: up to 15 an element.

// All tensors, see `tensors.cu`: a row of the table is (new parameter and states, old ones, gradient). Old and new may be
// equal. Gradients are divided by `*scale`; if not `*ok` the old values stay.
extern "C" __global__ void update_all(TENSORS, const R* rate, const N* step, const bool* ok, const S* scale) {
    __shared__ Scalars scalars;
    if (threadIdx.x == 0) scalars = prepare((double)*rate, (double)*step);
    __syncthreads();
    CHUNK_OF(k, begin, end);
    const Scalars s = scalars;
    const bool moves = *ok;
    const T divisor = *scale;
    S* const* row = table + (long long)k * (2 * STATES + 3);
    S *to[STATES + 1], *from[STATES + 1];  // read once, and not for each element
    for (int n = 0; n <= STATES; n++) to[n] = row[n], from[n] = row[STATES + 1 + n];
    in_own_dtype(row[2 * STATES + 2], kinds[k], [&](auto* gradient) {
        each_pack(begin, end, [&](auto neighbors, long long i) {
            const int count = neighbors.count;
            const auto g = load<count>(gradient + i);
            Pack<S, count> x[STATES + 1];
            for (int n = 0; n <= STATES; n++) x[n] = load<count>(from[n] + i);
            for (int j = 0; j < count; j++) {
                T v[STATES + 1];
                for (int n = 0; n <= STATES; n++) v[n] = x[n].v[j];
                if (moves) apply(s, v, (T)g.v[j] / divisor);
                for (int n = 0; n <= STATES; n++) x[n].v[j] = v[n];
            }
            for (int n = 0; n <= STATES; n++) store(to[n] + i, x[n]);
        });
    });
}

// Only the rows `ids` of a table (length, inner) and of its states: the threads at the first place of each id apply the
// rule once, to the sum of its run, see `runs.cu`; none does if `*ok` is 0.
// Bytes: the gradient rows once, the touched rows of parameter and states twice.
extern "C" __global__ void update_rows(TABLES, const I* sorted, const S* rows, const long long* order,
                                       const T* parts, const R* rate, const N* step, const K* ok,
                                       long long count, long long length, long long inner) {
    __shared__ Scalars scalars;
    if (threadIdx.x == 0 && threadIdx.y == 0) scalars = prepare((double)*rate, (double)*step);
    __syncthreads();
    const Scalars s = scalars;
    S* const tables[STATES + 1] = {EACH_TABLE};
    const long long place = (long long)blockIdx.x * blockDim.y + threadIdx.y;
    if (place >= count || (double)*ok == 0 || !begins_run(sorted, place, length)) return;
    const long long end = run_end(sorted, place, count), start = (long long)sorted[place] * inner;
    FOR_PACKS(k) {
        Pack<S, PACK> x[STATES + 1];
        for (int n = 0; n <= STATES; n++) x[n] = load<PACK>(tables[n] + start + k);
        const auto sum = sum_of_run(rows, order, parts, place, end, inner, k);
        for (int j = 0; j < PACK; j++) {
            T v[STATES + 1];
            for (int n = 0; n <= STATES; n++) v[n] = x[n].v[j];
            apply(s, v, sum.v[j]);
            for (int n = 0; n <= STATES; n++) x[n].v[j] = v[n];
        }
        for (int n = 0; n <= STATES; n++) store(tables[n] + start + k, x[n]);
    }
}
