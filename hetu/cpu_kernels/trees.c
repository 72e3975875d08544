// Decision trees: histograms of nodes, their best cuts, rows that part, and the leaves to which rows come.
//
// T is the type of sums, which are whole numbers; of leaves it is that of the numbers of rows. Rows of a node stand in
// `rows` from `starts[node]` on. Histograms are (slots, nodes, size, channels).

#include "cuts.h"

static inline long long end_of(const long long* starts, long long node, long long nodes, long long count) {
    return node + 1 < nodes ? starts[node + 1] : count;
}

// -- what is computed -------------------------------------------------------------------------------------------------

void histograms_plainly(const Word* a, long long first, long long last, char* scratch) {
    T *const out = a[0].p, *const values = a[2].p;
    const unsigned char* const bins = a[1].p;
    const long long *const rows = a[3].p, *const starts = a[4].p, *const features = a[5].p, count = a[6].n;
    const long long columns = a[7].n, channels = a[8].n, nodes = a[9].n, slots = a[10].n, size = a[11].n;
    for (long long job = first; job < last; job++)  // (node, slot)
        for (long long bin = 0; bin < size; bin++)
            for (long long c = 0; c < channels; c++) {
                const long long node = job / slots, slot = job % slots;
                T* const cell = out + ((slot * nodes + node) * size + bin) * channels + c;
                *cell = 0;
                for (long long k = starts[node]; k < end_of(starts, node, nodes, count); k++)
                    if (bins[rows[k] * columns + features[job]] == bin) *cell += values[k * channels + c];
            }
}

void best_cuts_plainly(const Word* a, long long first, long long last, char* scratch) {
    const T *const found = a[2].p, *const totals = a[3].p;
    const double *const least = a[4].p, l2 = a[9].x;
    const long long slots = a[5].n, nodes = a[6].n, size = a[7].n, channels = a[8].n;
    for (long long job = first; job < last; job++) {  // (node, slot)
        const T* const bins = found + (job % slots * nodes + job / slots) * size * channels;
        double* const best = (double*)a[0].p + job;
        long long *const facts = (long long*)a[1].p + job * (2 + channels), node = job / slots;
        *best = -INFINITY;
        for (long long c = 0; c < 2 + channels; c++) facts[c] = 0;
        for (long long cut = 0; cut < size; cut++) {
            double of_left = 0, of_right = 0, left_h = 0, right_h = 0;
            long long sums[channels], next = cut + 1;
            for (long long c = 0; c < channels; c++) {
                sums[c] = 0;
                for (long long bin = 0; bin <= cut; bin++) sums[c] += bins[bin * channels + c];
                const double left = sums[c], right = totals[node * channels + c] - sums[c];
                if (c == channels - 1) left_h = left, right_h = right;
                else of_left += left * left, of_right += right * right;
            }
            const double score = of_left / (left_h + l2) + of_right / (right_h + l2);
            if (!(left_h > least[node] && right_h > least[node] && score > *best)) continue;
            for (bool any = false; next < size; next++) {
                for (long long c = 0; c < channels; c++) any |= bins[next * channels + c] != 0;
                if (any) break;
            }
            *best = score, facts[0] = cut, facts[1] = next - 1;
            for (long long c = 0; c < channels; c++) facts[2 + c] = sums[c];
        }
    }
}

void part_rows_plainly(const Word* a, long long first, long long last, char* scratch) {
    long long *const out = a[0].p, *const lefts = a[1].p, *const rows = a[3].p, *const starts = a[4].p;
    const unsigned char* const bins = a[2].p;
    const long long *const features = a[5].p, *const cuts = a[6].p, count = a[7].n, columns = a[8].n, nodes = a[9].n;
    for (long long node = first; node < last; node++) {
        long long to = starts[node];
        for (int right = 0; right < 2; right++) {
            for (long long k = starts[node]; k < end_of(starts, node, nodes, count); k++)
                if ((bins[rows[k] * columns + features[node]] > cuts[node]) == right) out[to++] = rows[k];
            if (!right) lefts[node] = to - starts[node];
        }
    }
}

void tree_leaves_plainly(const Word* a, long long first, long long last, char* scratch) {
    const T *const x = a[1].p, *const thresholds = a[3].p;
    const long long *const features = a[2].p, *const lefts = a[4].p, *const roots = a[5].p;
    const long long columns = a[6].n, trees = a[7].n;
    for (long long job = first; job < last; job++)
        for (long long t = 0; t < trees; t++) {
            long long at = roots[t];
            while (lefts[at]) at = lefts[at] + (x[job * columns + features[at]] > thresholds[at]);
            ((long long*)a[0].p)[job * trees + t] = at;
        }
}

// -- the fast forms ---------------------------------------------------------------------------------------------------

// Two channels side by side, the common case, are added as one.
typedef struct {
    T g, h;
} Pair;

// Jobs are (node, slot). All slots of a node are filled in one run over its rows, as far as they are of these jobs.
void histograms(const Word* a, long long first, long long last, char* scratch) {
    T *const out = a[0].p, *const values = a[2].p;
    const unsigned char* const bins = a[1].p;
    const long long *const rows = a[3].p, *const starts = a[4].p, *const features = a[5].p, count = a[6].n;
    const long long columns = a[7].n, channels = a[8].n, nodes = a[9].n, slots = a[10].n, size = a[11].n;
    const long long step = nodes * size * channels;  // from slot to slot
    while (first < last) {
        const long long node = first / slots, begin = first % slots, rest = begin + last - first;
        const long long width = (rest < slots ? rest : slots) - begin, end = end_of(starts, node, nodes, count);
        const long long* const of = features + first;
        T* const to = out + begin * step + node * size * channels;
        for (long long j = 0; j < width; j++) memset(to + j * step, 0, size * channels * sizeof(T));
        for (long long k = starts[node]; k < end; k++) {
            const unsigned char* const row = bins + rows[k] * columns;
            const T* const value = values + k * channels;
            if (k + 16 < end) __builtin_prefetch(bins + rows[k + 16] * columns);
            if (channels == 2) {
                const Pair add = *(const Pair*)value;
                for (long long j = 0; j < width; j++) {
                    Pair* const cell = (Pair*)(to + j * step) + row[of[j]];
                    cell->g += add.g, cell->h += add.h;
                }
            } else
                for (long long j = 0; j < width; j++) {
                    T* const cell = to + j * step + row[of[j]] * channels;
                    for (long long c = 0; c < channels; c++) cell[c] += value[c];
                }
        }
        first += width;
    }
}

// Jobs are (node, slot).
void best_cuts(const Word* a, long long first, long long last, char* scratch) {
    const T *const found = a[2].p, *const totals = a[3].p;
    const long long slots = a[5].n, nodes = a[6].n, size = a[7].n, channels = a[8].n;
    Node n = node_in(scratch, size);
    for (; first < last; first++) {
        const long long node = first / slots;
        const T* const sums = found + (first % slots * nodes + node) * size * channels;
        long long* const facts = (long long*)a[1].p + first * (2 + channels);
        n.total = totals + node * channels, n.least = ((double*)a[4].p)[node], n.l2 = a[9].x;
        memset(facts, 0, (2 + channels) * sizeof *facts);
        ((double*)a[0].p)[first] = best_cut(&n, sums, note_all(&n, sums, size, channels), channels, -INFINITY, facts);
    }
}

// Jobs are nodes. Each row is written to both sides, and stays on its own.
void part_rows(const Word* a, long long first, long long last, char* scratch) {
    const unsigned char* const bins = a[2].p;
    const long long *const rows = a[3].p, *const starts = a[4].p;
    const long long *const features = a[5].p, *const cuts = a[6].p, count = a[7].n, columns = a[8].n, nodes = a[9].n;
    long long* const aside = (long long*)scratch;
    for (; first < last; first++) {
        const long long end = end_of(starts, first, nodes, count), cut = cuts[first];
        const unsigned char* const column = bins + features[first];
        long long *left = (long long*)a[0].p + starts[first], *right = aside;
        for (long long k = starts[first]; k < end; k++) {
            const long long row = rows[k];
            const bool goes = column[row * columns] > cut;
            *left = *right = row;
            left += !goes, right += goes;
        }
        memcpy(left, aside, (right - aside) * sizeof(long long));
        ((long long*)a[1].p)[first] = end - starts[first] - (right - aside);
    }
}

// Jobs are rows; their trees follow while the row is near.
void tree_leaves(const Word* a, long long first, long long last, char* scratch) {
    tree_leaves_plainly(a, first, last, scratch);
}
