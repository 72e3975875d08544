// Sums of rows by their ids, without atomics, so that a step gives the same digits in every run. `order` sorts the ids
// stably, and `sorted` is what comes of it: the places of one id are a run, whose rows are added in their order. A row of
// `inner` elements takes up to a warp of threads, each on PACK neighbors, block (threads of a row, rows); grid.y goes
// over what is wider. `tables.py` puts PIECE in front: a run is cut at its multiples, so that a frequent id does not keep
// one warp busy alone.
#define FOR_PACKS(k)                                                                         \
    for (long long k = ((long long)blockIdx.y * blockDim.x + threadIdx.x) * PACK; k < inner; \
         k += (long long)gridDim.y * blockDim.x * PACK)
constexpr int TOGETHER = 4;  // rows under way at once, which hides how long each takes

// Whether a run begins at `place`, of an id that is a row of the table.
__device__ inline bool begins_run(const I* sorted, long long place, long long length) {
    const I id = sorted[place];
    return (place == 0 || sorted[place - 1] != id) && (long long)id >= 0 && (long long)id < length;
}

// Where the run of `place` ends, or `limit`: by steps that double while they stay in the run, and then halve.
__device__ inline long long run_end(const I* sorted, long long place, long long limit) {
    const I id = sorted[place];
    long long step = 1;
    for (; place + step < limit && sorted[place + step] == id; step *= 2) place += step;
    while (step /= 2)
        if (place + step < limit && sorted[place + step] == id) place += step;
    return place + 1;
}

// The sum of columns k to k + PACK over the places of a run from `place` to `end`: its rows up to a multiple of PIECE, and
// the sums of the pieces that follow.
__device__ inline Pack<T, PACK> sum_of_run(const S* rows, const long long* order, const T* parts, long long place,
                                           long long end, long long inner, long long k) {
    const long long piece = place / PIECE + 1, cut = end < piece * PIECE ? end : piece * PIECE;
    Pack<T, PACK> sum = {};
    for (long long p = place; p < cut; p += TOGETHER) {
        const int some = cut - p < TOGETHER ? cut - p : TOGETHER;
        Pack<S, PACK> row[TOGETHER];
#pragma unroll
        for (int i = 0; i < TOGETHER; i++)
            if (i < some) row[i] = load<PACK>(rows + order[p + i] * inner + k);
#pragma unroll
        for (int i = 0; i < TOGETHER; i++)
            for (int j = 0; j < PACK; j++)
                if (i < some) sum.v[j] += (T)row[i].v[j];
    }
    const long long after = (end + PIECE - 1) / PIECE;
#pragma unroll 4
    for (long long p = piece; p < after; p++)
        for (int j = 0; j < PACK; j++) sum.v[j] += parts[p * inner + k + j];
    return sum;
}

// parts[p] = the sum from place p PIECE to the next multiple, for runs that began before.
// Bytes: the rows of long runs once; the threads that add up whole runs read only what is left of them.
extern "C" __global__ void sum_pieces(const I* sorted, const S* rows, const long long* order, T* parts, long long count,
                                      long long inner) {
    const long long piece = (long long)blockIdx.x * blockDim.y + threadIdx.y + 1, place = piece * PIECE;
    if (place >= count || sorted[place - 1] != sorted[place]) return;
    const long long end = run_end(sorted, place, place + PIECE < count ? place + PIECE : count);
    FOR_PACKS(k) {
        const auto sum = sum_of_run(rows, order, parts, place, end, inner, k);
        for (int j = 0; j < PACK; j++) parts[piece * inner + k + j] = sum.v[j];
    }
}
