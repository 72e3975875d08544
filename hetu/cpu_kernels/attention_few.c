// Attention of few queries, where the tiles of `attention.c` would be padding mostly: each query goes by itself over the
// keys, and then over the values. What is meant, and the words, are those of `attention`.

#include <string.h>

#include "vectors.h"

#pragma STDC FP_CONTRACT ON

typedef struct {  // matrices of all heads
    const T* at;
    const long long* heads;
    long long row, column;
} Heads;

enum { KEYS = 16 };  // that are folded at once, and of which scores are a multiple

static inline Heads heads_of(const Word* a) { return (Heads){a[0].p, a[1].p, a[2].n, a[3].n}; }

static inline long long up(long long n) { return (n + KEYS - 1) / KEYS * KEYS; }

static T folded(T* lanes, bool greatest) {
    for (int width = KEYS / 2; width; width /= 2)
        for (int l = 0; l < width; l++) lanes[l] = greatest ? fmax(lanes[l], lanes[l + width]) : lanes[l] + lanes[l + width];
    return lanes[0];
}

// Scores, with -inf after them up to whole KEYS, become weights; the logarithm of the sum of their powers.
static T softmax(T* scores, long long keys) {
    T greatest[KEYS], sums[KEYS] = {0};
    for (int l = 0; l < KEYS; l++) greatest[l] = scores[l];
    for (long long j = KEYS; j < up(keys); j += KEYS)
        EACH for (int l = 0; l < KEYS; l++) greatest[l] = fmax(greatest[l], scores[j + l]);
    const T most = folded(greatest, true);
    for (long long j = 0; j < up(keys); j += KEYS)
        EACH for (int l = 0; l < KEYS; l++) sums[l] += scores[j + l] = exp(scores[j + l] - most);
    const T sum = folded(sums, false), inverse = 1 / sum;
    EACH for (long long j = 0; j < keys; j++) scores[j] *= inverse;
    return most + log(sum);
}

// y = weights v for `count` vectors of columns from c on.
static inline __attribute__((always_inline)) void vectors(
    T* y, const T* weights, const T* rows, long long row, long long keys, long long c, long long width, const int count) {
    const long long over = c + count * LANES - width, back = over > 0 ? over : 0;
    Vector sums[MANY] = {0};
    for (long long j = 0; j < keys; j++) {
        const T weight = weights[j], *const x = rows + j * row + c;
        for (int n = 0; n < count - 1; n++) sums[n] += weight * *(const Vector*)(x + n * LANES);
        sums[count - 1] += weight * *(const Vector*)(x + (count - 1) * LANES - back);
    }
    for (int n = 0; n < count; n++) *(Vector*)(y + c + n * LANES - (n == count - 1 ? back : 0)) = sums[n];
}

static void weigh(T* y, const T* weights, Heads v, const T* rows, long long keys, long long width) {
    if (v.column != 1 || width < LANES) {
        for (long long c = 0; c < width; c++) y[c] = 0;
        for (long long j = 0; j < keys; j++)
            EACH for (long long c = 0; c < width; c++) y[c] += weights[j] * rows[j * v.row + c * v.column];
        return;
    }
#define WEIGH(c, count) vectors(y, weights, rows, v.row, keys, c, width, count)
    FOR_VECTORS_OF(width, WEIGH)
}

// The products of all queries, scaled and side by side, with KEYS keys at a time, which are turned for it.
static void scores_of(
    const T* q, Heads k, const T* from, T* turned, T* scores, long long queries, long long keys, long long depth) {
    for (long long j = 0; j < keys; j += KEYS) {
        const T* const rows = from + j * k.row;
        const long long last = keys - j - 1;  // is there again for the places behind it
        for (long long c = 0; c < depth; c++)
            EACH for (int l = 0; l < KEYS; l++)
                turned[c * KEYS + l] = rows[(l < last ? l : last) * k.row + c * k.column];
        for (long long i = 0; i < queries; i++) {
            Vector sums[KEYS / LANES] = {0};
            for (long long c = 0; c < depth; c++)
                for (int n = 0; n < KEYS / LANES; n++)
                    sums[n] += q[i * depth + c] * *(const Vector*)(turned + c * KEYS + n * LANES);
            memcpy(scores + i * up(keys) + j, sums, sizeof sums);
        }
    }
}

// Biases and masks of one query, and -inf up to whole KEYS.
static void hide(const Word* a, long long head, long long i, T* scores, long long keys) {
    const Heads seen = heads_of(a + 12), bias = heads_of(a + 16);
    const unsigned char* const sees = seen.at ? (unsigned char*)a[12].p + seen.heads[head] + i * seen.row : 0;
    const T* const added = bias.at ? bias.at + bias.heads[head] + i * bias.row : 0;
    const long long past = a[26].n && i + 1 < keys ? i + 1 : keys;  // causal order
    bool any = !sees;
    for (long long j = 0; j < past && !any; j++) any = sees[j * seen.column];
    for (long long j = 0; j < keys; j++) {
        if (j >= past || (sees && !sees[j * seen.column])) scores[j] = any ? -INFINITY : 0;
        else if (added) scores[j] += added[j * bias.column];
    }
    for (long long j = keys; j < up(keys); j++) scores[j] = -INFINITY;
}

// Jobs are heads.
void attention_few(const Word* a, long long first, long long last, char* scratch) {
    const Heads q = heads_of(a), k = heads_of(a + 4), v = heads_of(a + 8), y = heads_of(a + 27);
    const long long queries = a[21].n, keys = a[22].n, depth = a[23].n, width = a[24].n;
    T *const total = a[20].p, *const scores = (T*)scratch, *const scaled = scores + queries * up(keys);
    T *const turned = scaled + queries * depth, *const made = turned + depth * KEYS;
    for (long long head = first; head < last; head++) {
        for (long long i = 0; i < queries; i++)
            for (long long c = 0; c < depth; c++)
                scaled[i * depth + c] = (T)a[25].x * q.at[q.heads[head] + i * q.row + c * q.column];
        scores_of(scaled, k, k.at + k.heads[head], turned, scores, queries, keys, depth);
        for (long long i = 0; i < queries; i++) {
            T *const weights = scores + i * up(keys), *const to = (T*)y.at + y.heads[head] + i * y.row;
            hide(a, head, i, weights, keys);
            total[head * queries + i] = softmax(weights, keys);
            weigh(made, weights, v, v.at + v.heads[head], keys, width);
            for (long long c = 0; c < width; c++) to[c * y.column] = made[c];
        }
    }
}
