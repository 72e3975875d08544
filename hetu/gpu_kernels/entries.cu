// Sums of what is computed entry by entry, by the ids of the entries: in their order and without atomics, see `runs.cu`.
// `entries.py` puts the lines of a form in front, as VALUE(e, k): what entry e gives in column k. No row of an entry is in
// memory, and each sum is written once, however frequent its id: pieces of a long run are summed apart.
//
// Bytes: what is looked up once for each entry, and the sums once.

// The sum of column k over the places of a run from `place` to `end`: as `sum_of_run`.
__device__ inline T sum_of_entries(PARAMETERS, const long long* order, const T* parts, long long place, long long end,
                                   long long inner, long long k) {
    const long long piece = place / PIECE + 1, cut = end < piece * PIECE ? end : piece * PIECE;
    T sum = 0;
    for (; place < cut; place++) {
        const long long e = order[place];
        sum += VALUE(e, k);
    }
    for (long long p = piece, after = (end + PIECE - 1) / PIECE; p < after; p++) sum += parts[p * inner + k];
    return sum;
}

// parts[p] = the sum from place p PIECE to the next multiple, for runs that began before.
extern "C" __global__ void sum_pieces_of_entries(PARAMETERS, const I* sorted, const long long* order, T* parts,
                                                 long long count, long long inner) {
    const long long piece = (long long)blockIdx.x * blockDim.y + threadIdx.y + 1, place = piece * PIECE;
    if (place >= count || sorted[place - 1] != sorted[place]) return;
    const long long end = run_end(sorted, place, place + PIECE < count ? place + PIECE : count);
    FOR_PACKS(k) parts[piece * inner + k] = sum_of_entries(ARGUMENTS, order, parts, place, end, inner, k);
}

// y[i] = the sum of the entries whose id is i, by the threads at the first place of its run; y is 0 before.
extern "C" __global__ void sum_entries(PARAMETERS, const I* sorted, const long long* order, const T* parts, T* y,
                                       long long count, long long length, long long inner) {
    const long long place = (long long)blockIdx.x * blockDim.y + threadIdx.y;
    if (place >= count || !begins_run(sorted, place, length)) return;
    const long long end = run_end(sorted, place, count);
    T* const row = y + (long long)sorted[place] * inner;
    FOR_PACKS(k) row[k] = sum_of_entries(ARGUMENTS, order, parts, place, end, inner, k);
}
