// The best cut of a node in one column: `hetu.ops.best_cuts` says what it is.
//
// T is the type of sums, which are whole numbers. Bins that have a row stand side by side, and so do the scores of the
// cuts behind them. What is said of `channels` is compiled for two of them, the common case, and for any.

#include <string.h>

typedef struct {
    const T* total;  // of all channels, the last of which is H
    double least, l2;
    // to work in, one for each bin
    double *of_left, *of_right;
    T* left;
    int* filled;
} Node;

enum { LANES = 8 };  // of scores that are compared at once, up to so many behind the last

static inline Node node_in(char* scratch, long long size) {
    double* const numbers = (double*)scratch;
    T* const left = (T*)(numbers + 2 * (size + LANES));
    return (Node){.of_left = numbers, .of_right = numbers + size + LANES, .left = left, .filled = (int*)(left + size)};
}

// Note a bin as one of `count` that have a row, if it has one; how many there are then.
static inline long long note(const Node* n, const T* sums, long long bin, long long count, long long channels) {
    bool any = false;
    for (long long c = 0; c < channels; c++) any |= sums[bin * channels + c] != 0;
    n->filled[count] = bin;
    return count + any;
}

static inline long long note_all(const Node* n, const T* sums, long long size, long long channels) {
    long long count = 0;
    if (channels == 2)
        for (long long bin = 0; bin < size; bin++) count = note(n, sums, bin, count, 2);
    else
        for (long long bin = 0; bin < size; bin++) count = note(n, sums, bin, count, channels);
    return count;
}

// The scores of cuts behind each of `count` bins, in `of_left`; the best one.
static inline double scored(const Node* n, const T* sums, long long count, long long channels) {
    const int* const filled = n->filled;
    double *const of_left = n->of_left, *const of_right = n->of_right, least = n->least, l2 = n->l2;
    T* const left = n->left;
    for (long long j = 0; j < count; j++) of_left[j] = of_right[j] = 0;
    for (long long c = 0; c < channels; c++) {
        const T total = n->total[c];
        T sum = 0;
        for (long long j = 0; j < count; j++) left[j] = sum += sums[filled[j] * channels + c];
        if (c < channels - 1)
            EACH for (long long j = 0; j < count; j++) {
                const double l = left[j], r = total - left[j];
                of_left[j] += l * l, of_right[j] += r * r;
            }
        else
            EACH for (long long j = 0; j < count; j++) {
                const double l = left[j], r = total - left[j], score = of_left[j] / (l + l2) + of_right[j] / (r + l2);
                of_left[j] = (l > least) & (r > least) ? score : -INFINITY;
            }
    }
    double best[LANES];
    for (int k = 0; k < LANES; k++) best[k] = of_left[count + k] = -INFINITY;
    for (long long j = 0; j < count; j += LANES)
        for (int k = 0; k < LANES; k++) best[k] = of_left[j + k] > best[k] ? of_left[j + k] : best[k];
    for (int k = 1; k < LANES; k++) best[0] = best[k] > best[0] ? best[k] : best[0];
    return best[0];
}

// The best score of cuts behind `count` bins. If it is more than `best`, `facts` are those of the first that has it.
static double best_cut(const Node* n, const T* sums, long long count, long long channels, double best, long long* facts) {
    const double score = channels == 2 ? scored(n, sums, count, 2) : scored(n, sums, count, channels);
    if (!(score > best)) return best;
    long long at = 0;
    while (n->of_left[at] != score) at++;
    facts[0] = n->filled[at], facts[1] = n->filled[at + 1] - 1;
    for (long long c = 0; c < channels; c++) {
        facts[2 + c] = 0;
        for (long long j = 0; j <= at; j++) facts[2 + c] += sums[n->filled[j] * channels + c];
    }
    return score;
}
