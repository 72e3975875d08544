// Whole trees, grown from the rows of their roots: `hetu.ops.grow_trees` says what they are. A job is a root.
//
// T is the type of values, which are whole numbers. A node counts its rows column by column; they stand side by side,
// and their values with them. Left out: histograms of parents, which pay where a node has many more rows than bins.

#include "cuts.h"

typedef unsigned long long Bits;  // 64 of them
typedef T Two __attribute__((vector_size(2 * sizeof(T)), aligned(sizeof(T))));

// What is known of a node; then come sums of every channel: of rows on the left of its cut, and of all rows.
enum { LEFT, BEGIN, END, DEPTH, PARENT, KEY, FEATURE, CUT, LAST, SUMS };

enum { FEW = 40, SIDE_BY_SIDE = 8 };  // rows of a node whose bins are noted as most are empty; columns that are counted

typedef struct {
    const unsigned char* bins;
    const double* target;  // null if nobody has to know which nodes are of one kind
    long long down, across;  // from row to row, and from column to column
    long long columns, channels, size, features, max_depth, most, least_rows, least_leaf;
    double least_gain;
    // of this tree
    const long long* order;
    const double* units;  // the least H, l2, and what a gain is multiplied by
    long long count, width, *rows, *facts;
    double* gains;
    // to work in
    Node n;
    T *values, *sums, *total;
    long long *looked, *aside, *heap;
} Tree;

static inline long long* facts_of(const Tree* t, long long node) { return t->facts + node * t->width; }

// -- columns ----------------------------------------------------------------------------------------------------------

// A number that follows from another (S. Vigna, "splitmix64").
static inline Bits mixed(Bits x) {
    x += 0x9E3779B97F4A7C15u;
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    return x ^ x >> 31;
}

// The columns in the order in which a node looks at them.
static const long long* columns_of(const Tree* t, Bits key) {
    if (t->features == t->columns) return t->order;
    for (long long j = 0; j < t->columns; j++) t->looked[j] = j;
    for (long long j = 0; j < t->features; j++) {
        const long long other = j + mixed(key + 3 + j) % (t->columns - j), column = t->looked[j];
        t->looked[j] = t->looked[other], t->looked[other] = column;
    }
    return t->looked;
}

// -- the best cut of a node -------------------------------------------------------------------------------------------

// Add the rows of a node to the sums of the bins of `width` columns, which are 0 before; `there` has bits of these bins.
static inline void count_rows(
    const Tree* t, const long long* node, const long long* looked, long long width, long long channels, Bits (*there)[4]) {
    const unsigned char* columns[SIDE_BY_SIDE];
    for (long long j = 0; j < width; j++) columns[j] = t->bins + looked[j] * t->across;
    const long long *row = t->rows + node[BEGIN], *const end = t->rows + node[END], down = t->down, step = t->size * channels;
    const T* value = t->values + node[BEGIN] * channels;
    T* const sums = t->sums;
    for (; row < end; row++, value += channels) {
        const long long at = *row * down;
        for (long long j = 0; j < width; j++) {
            const unsigned bin = columns[j][at];
            T* const sum = sums + j * step + bin * channels;
            if (channels == 2) *(Two*)sum += *(const Two*)value;
            else
                for (long long c = 0; c < channels; c++) sum[c] += value[c];
            if (there) there[j][bin / 64] |= 1ull << bin % 64;
        }
    }
}

// Note the best of all cuts in some columns, the first of equal ones; its score.
static double best_among(Tree* t, long long* node, const long long* looked, long long slots) {
    const long long channels = t->channels, size = t->size;
    double best = -INFINITY;
    for (long long slot = 0, width; slot < slots; slot += width) {
        width = slots - slot < SIDE_BY_SIDE ? slots - slot : SIDE_BY_SIDE;
        Bits there[SIDE_BY_SIDE][4] = {0};
        const bool few = node[END] - node[BEGIN] < FEW;
        if (few) count_rows(t, node, looked + slot, width, channels, there);
        else if (width == SIDE_BY_SIDE && channels == 2) count_rows(t, node, looked + slot, SIDE_BY_SIDE, 2, 0);
        else if (channels == 2) count_rows(t, node, looked + slot, width, 2, 0);
        else count_rows(t, node, looked + slot, width, channels, 0);
        for (long long j = 0; j < width; j++) {
            T* const sums = t->sums + j * size * channels;
            long long count = few ? 0 : note_all(&t->n, sums, size, channels);
            for (int part = 0; part < 4; part++)
                for (; there[j][part]; there[j][part] &= there[j][part] - 1)
                    count = note(&t->n, sums, part * 64 + __builtin_ctzll(there[j][part]), count, channels);
            const double score = best_cut(&t->n, sums, count, channels, best, node + CUT);
            if (!few) memset(sums, 0, size * channels * sizeof(T));
            for (long long k = 0; few && k < count; k++)
                memset(sums + t->n.filled[k] * channels, 0, channels * sizeof(T));
            if (score > best) best = score, node[FEATURE] = looked[slot + j];
        }
    }
    return best;
}

static bool of_one_kind(const Tree* t, const long long* node) {
    const double first = t->target[t->rows[node[BEGIN]]];
    for (long long k = node[BEGIN] + 1; k < node[END]; k++)
        if (t->target[t->rows[k]] != first) return false;
    return true;
}

static void judge(Tree* t, long long number) {
    long long* const node = facts_of(t, number);
    const long long count = node[END] - node[BEGIN], last = t->channels - 1;
    if (count < t->least_rows || count < 2 * t->least_leaf || (t->max_depth && node[DEPTH] >= t->max_depth)) return;
    if (t->target && of_one_kind(t, node)) return;
    const long long* const sums = node + SUMS + t->channels;
    const double h = sums[last], share = (t->least_leaf - 1) * h / count;
    t->n.least = share > t->units[0] ? share : t->units[0], t->n.l2 = t->units[1];
    for (long long c = 0; c <= last; c++) t->total[c] = sums[c];
    const long long* const looked = columns_of(t, node[KEY]);
    double score = best_among(t, node, looked, t->features), before = 0;
    if (score == -INFINITY && t->target)  // what must be split looks at the others, too
        score = best_among(t, node, looked + t->features, t->columns - t->features);
    if (score == -INFINITY) return;
    for (long long c = 0; c < last; c++) before += (double)sums[c] * sums[c];
    t->gains[number] = (score - before / (h + t->units[1] > 1 ? h + t->units[1] : 1)) * t->units[2];
}

// -- growth -----------------------------------------------------------------------------------------------------------

static void split(Tree* t, long long number) {
    long long *const node = facts_of(t, number), *aside = t->aside, channels = t->channels, to = node[BEGIN];
    const unsigned char* const column = t->bins + node[FEATURE] * t->across;
    T* values = t->values + to * channels;
    T *const values_aside = (T*)(t->aside + (node[END] - to)), *right = values_aside;
    const T* value = values;
    for (long long k = to; k < node[END]; k++, value += channels) {
        const long long row = t->rows[k];
        const bool goes = column[row * t->down] > node[CUT];
        t->rows[to] = *aside = row;
        for (long long c = 0; c < channels; c++) values[c] = right[c] = value[c];
        to += !goes, aside += goes, values += goes ? 0 : channels, right += goes ? channels : 0;
    }
    memcpy(t->rows + to, t->aside, (aside - t->aside) * sizeof *aside);
    memcpy(values, values_aside, (right - values_aside) * sizeof *right);
    node[LEFT] = t->count;
    for (int side = 0; side < 2; side++, t->count++) {
        long long* const child = facts_of(t, t->count);
        child[BEGIN] = side ? to : node[BEGIN], child[END] = side ? node[END] : to;
        child[DEPTH] = node[DEPTH] + 1, child[PARENT] = number, child[KEY] = mixed(node[KEY] + 1 + side);
        for (long long c = SUMS; c < SUMS + channels; c++) child[c + channels] = side ? node[c + channels] - node[c] : node[c];
    }
}

// Whether a node is split before another: the better one, of equal ones the upper one, then the left one.
static bool precedes(const Tree* t, long long a, long long b) {
    if (t->gains[a] != t->gains[b]) return t->gains[a] > t->gains[b];
    const long long *one = facts_of(t, a), *other = facts_of(t, b);
    if (one[DEPTH] != other[DEPTH]) return one[DEPTH] < other[DEPTH];
    for (; one[PARENT] != other[PARENT]; one = facts_of(t, a), other = facts_of(t, b)) a = one[PARENT], b = other[PARENT];
    return a < b;
}

static void push(const Tree* t, long long* waiting, long long node) {
    long long at = (*waiting)++;
    for (; at && precedes(t, node, t->heap[(at - 1) / 2]); at = (at - 1) / 2) t->heap[at] = t->heap[(at - 1) / 2];
    t->heap[at] = node;
}

static long long pop(const Tree* t, long long* waiting) {
    const long long top = t->heap[0], node = t->heap[--*waiting], count = *waiting;
    long long at = 0;
    for (long long next; (next = 2 * at + 1) < count; at = next) {
        next += next + 1 < count && precedes(t, t->heap[next + 1], t->heap[next]);
        if (!precedes(t, t->heap[next], node)) break;
        t->heap[at] = t->heap[next];
    }
    t->heap[at] = node;
    return top;
}

static void grow(Tree* t) {
    judge(t, 0);
    for (long long node = 0; !t->most && node < t->count; node++) {
        if (!(t->gains[node] >= t->least_gain)) continue;
        split(t, node);
        judge(t, t->count - 2), judge(t, t->count - 1);
    }
    long long waiting = 0, leaves = 1;
    if (t->most > 1 && t->gains[0] >= t->least_gain) push(t, &waiting, 0);
    while (waiting) {
        split(t, pop(t, &waiting));
        if (++leaves == t->most) break;
        for (long long child = t->count - 2; child < t->count; child++) {
            judge(t, child);
            if (t->gains[child] >= t->least_gain) push(t, &waiting, child);
        }
    }
}

void grow_trees(const Word* a, long long first, long long last, char* scratch) {
    const long long *const starts = a[7].p, *const begun = a[10].p, roots = a[12].n, entries = a[13].n, room = a[16].n;
    Tree t = {a[4].p, a[8].p, a[14].n, a[15].n, a[17].n, a[18].n, a[19].n,
              a[20].n, a[21].n, a[22].n, a[23].n, a[24].n, a[25].x};
    t.width = SUMS + 2 * t.channels, t.rows = a[0].p;
    t.looked = (long long*)scratch, t.heap = t.looked + t.columns, t.aside = t.heap + entries;
    t.values = (T*)(t.aside + entries) + entries * t.channels;
    t.sums = t.values + entries * t.channels, t.total = t.sums + SIDE_BY_SIDE * t.size * t.channels;
    t.n = node_in((char*)(t.total + t.channels + t.channels % 2), t.size), t.n.total = t.total;
    memset(t.sums, 0, SIDE_BY_SIDE * t.size * t.channels * sizeof(T));
    for (long long k = first; k < last; k++) {
        const long long begin = starts[k], end = k + 1 < roots ? starts[k + 1] : entries;
        const long long base = room ? k * room : 2 * begin + k, most = room ? room : 2 * (end - begin) + 1;
        t.order = (long long*)a[9].p + k * t.columns, t.units = (double*)a[11].p + 3 * k;
        t.facts = (long long*)a[1].p + base * t.width, t.gains = (double*)a[2].p + base;
        memset(t.facts, 0, most * t.width * sizeof *t.facts);
        for (long long node = 0; node < most; node++) t.gains[node] = -INFINITY;
        memcpy(t.rows + begin, (long long*)a[6].p + begin, (end - begin) * sizeof *t.rows);
        memcpy(t.values + begin * t.channels, (T*)a[5].p + begin * t.channels, (end - begin) * t.channels * sizeof(T));
        t.facts[BEGIN] = begin, t.facts[END] = end, t.facts[DEPTH] = begun[2 * k], t.facts[KEY] = begun[2 * k + 1];
        for (long long j = begin; j < end; j++)
            for (long long c = 0; c < t.channels; c++) t.facts[SUMS + t.channels + c] += t.values[j * t.channels + c];
        t.count = 1;
        if (end > begin) grow(&t);
        ((long long*)a[3].p)[k] = t.count;
    }
}
