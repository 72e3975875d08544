// Topics of words, drawn again: `drawn_topics` of hetu/ops/topics.py, with its bits. Its jobs are documents.

#include <string.h>

void drawn_topics(const Word* a, long long first, long long last, char* scratch) {
    long long* const out = a[0].p;
    const long long *const topics = a[1].p, *const words = a[2].p, *const starts = a[4].p;
    const T *const weights = a[3].p, *const counts = a[5].p, *const totals = a[6].p, *const draws = a[7].p;
    const long long documents = a[8].n, tokens = a[9].n, k = a[10].n;
    const T alpha = a[11].x, beta = a[12].x, all = a[13].x;
    T *const here = (T*)scratch, *const shares = here + k, *const sums = shares + k;
    for (long long j = 0; j < k; j++) shares[j] = 1 / (totals[j] + all);
    for (long long d = first; d < last; d++) {
        const long long begin = starts[d], end = d + 1 < documents ? starts[d + 1] : tokens;
        memset(here, 0, k * sizeof(T));
        for (long long i = begin; i < end; i++) here[topics[i]] += weights[i];
        for (long long i = begin; i < end; i++) {
            const long long old = topics[i];
            const T *const seen = counts + words[i] * k, weight = weights[i];
            here[old] -= weight;
            EACH for (long long j = 0; j < k; j++) sums[j] = (here[j] + alpha) * (seen[j] + beta) * shares[j];
            sums[old] = (here[old] + alpha) * (seen[old] - weight + beta) * (1 / (totals[old] - weight + all));
            for (long long j = 1; j < k; j++) sums[j] += sums[j - 1];
            const T level = draws[i] * sums[k - 1];
            long long new = 0;
            for (long long j = 0; j < k; j++) new += sums[j] <= level;
            new = new < k ? new : k - 1;
            here[new] += weight;
            out[i] = new;
        }
    }
}
