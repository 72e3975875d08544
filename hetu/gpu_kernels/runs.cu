// Sums of rows by their ids, without atomics, so that a step gives the same digits in every run. `order` sorts the ids
// stably; the places of one id are a run, and its rows are added in their order. `tables.py` puts PIECE in front: a run
// is cut at its multiples, so that a frequent id does not keep one warp busy alone.

// How many of the places `place`, `place + step`, ... before `limit` hold `id`, up to the first that does not; found by
// a whole warp, 32 places at a time.
__device__ inline long long count_places(const I* ids, const long long* order, I id, long long place, long long step,
                                         long long limit) {
    for (long long found = 0;; found += 32) {
        const long long p = place + (found + threadIdx.x) * step;
        const unsigned int same = __ballot_sync(0xffffffffu, p < limit && ids[order[p]] == id);
        if (same != 0xffffffffu) return found + __ffs(~same) - 1;
    }
}

struct Run {
    long long place, end, piece, pieces;  // its first places and, after a multiple of PIECE, the pieces that follow
};

__device__ inline Run run_from(const I* ids, const long long* order, long long place, long long count) {
    const long long piece = place / PIECE + 1, next = piece * PIECE;
    const I id = ids[order[place]];
    const long long first = count_places(ids, order, id, place, 1, next < count ? next : count);
    return {place, place + first, piece, count_places(ids, order, id, next, PIECE, count)};
}

__device__ inline T sum_of_run(const Run& run, const S* rows, const long long* order, const T* parts, long long inner,
                               long long k) {
    T sum = 0;
#pragma unroll 8
    for (long long p = run.place; p < run.end; p++) sum += (T)rows[order[p] * inner + k];
#pragma unroll 1  // few, and fewer registers let more warps run
    for (long long p = run.piece; p < run.piece + run.pieces; p++) sum += parts[p * inner + k];
    return sum;
}

// Whether a run begins at `place`, of an id that is a row of the table.
__device__ inline bool begins_run(const I* ids, const long long* order, long long place, long long length) {
    const I id = ids[order[place]];
    return (place == 0 || ids[order[place - 1]] != id) && (long long)id >= 0 && (long long)id < length;
}

// parts[p] = the sum from place p PIECE to the next multiple, for runs that began before. Block (32, 8), a warp each.
// Bytes: the rows of long runs once; the warps that add up whole runs read only what is left of them.
extern "C" __global__ void sum_pieces(const I* ids, const S* rows, const long long* order, T* parts, long long count,
                                      long long inner) {
    const long long piece = (long long)blockIdx.x * blockDim.y + threadIdx.y + 1, place = piece * PIECE;
    if (place >= count || ids[order[place - 1]] != ids[order[place]]) return;
    Run run = run_from(ids, order, place, count);
    run.pieces = 0;
    for (long long k = threadIdx.x; k < inner; k += 32)
        parts[piece * inner + k] = sum_of_run(run, rows, order, parts, inner, k);
}
