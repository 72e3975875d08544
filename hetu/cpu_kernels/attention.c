// Attention and its gradient: y = softmax(scale q k^T) v for each head, with causal order, masks and biases.
//
// A head is worked through in strips of queries. The scores of a strip lie with the queries side by side, as scores^T =
// k q^T: then every step of the softmax is the same for all numbers of a vector, and no product needs k^T. The gradient
// makes the scores again from what is kept of each query, `total`, the logarithm of the sum of its powers. Keys that no
// query of a strip sees are left out, so that causal order, lengths and windows save their work.

#include <string.h>

#include "panels.h"

typedef long long Size;

// What a head means. `seen` may be 0, as may `bias`; a query that sees nothing weighs all keys evenly.
void attention_plainly(const Word* a, Size first, Size last, char* scratch) {
    const T *q = a[0].p, *k = a[1].p, *v = a[2].p;
    const unsigned char* seen = a[3].p;
    const T* bias = a[4].p;
    T *y = a[5].p, *total = a[6].p, *scores = a[7].p;
    const Size s = a[8].n, t = a[9].n, d = a[10].n, e = a[11].n;
    const T scale = a[12].x;
    const bool causal = a[13].n;
    for (Size i = 0; i < s; i++) {
        bool any = false;
        T most = -INFINITY, sum = 0;
        for (Size j = 0; j < t; j++) any |= (!seen || seen[i * t + j]) && (!causal || j <= i);
        for (Size j = 0; j < t; j++) {
            const bool sees = (!seen || seen[i * t + j]) && (!causal || j <= i);
            T product = 0;
            for (Size f = 0; f < d; f++) product += q[i * d + f] * k[j * d + f];
            scores[j] = sees ? scale * product + (bias ? bias[i * t + j] : 0) : any ? -INFINITY : 0;
            most = fmax(most, scores[j]);
        }
        for (Size j = 0; j < t; j++) sum += exp(scores[j] - most);
        total[i] = most + log(sum);
        for (Size c = 0; c < e; c++) {
            y[i * e + c] = 0;
            for (Size j = 0; j < t; j++) y[i * e + c] += exp(scores[j] - most) / sum * v[j * e + c];
        }
    }
}

// -- products ---------------------------------------------------------------------------------------------------------

enum { UNIT = 16, QUERIES = 64, DEEP = 256 };  // UNIT: what sizes in scratch are multiples of

typedef struct {  // a matrix whose rows and columns may lie anywhere
    const T* at;
    Size row, column;
} Left;

typedef struct {  // a matrix in whole vectors, mostly in scratch
    T* at;
    Size pitch;
} Block;

// Tiles whose right side lies at a pitch, too; and those of one vector.
TILES(wide, AT_PITCH, step, Vector, offsets[1], START_FROM, BOTH, ADD, STORE)
TILES(narrow, AT_PITCH, step, Vector, offsets[1], START_HALF_FROM, , ADD_HALF, STORE_HALF)

// c = (add ? c : 0) + x y, where c has `rows` x `columns` numbers, whole tiles, and x `count` columns.
static void product(Left x, Block y, Block c, Size rows, Size columns, Size count, bool add) {
    const Size pitches[] = {x.row, y.pitch};
    for (Size k = 0; k < count; k += DEEP) {
        const Run run = {0, less(DEEP, count - k)};
        for (Size j = 0; j < columns; j += WIDE)
            for (Size i = 0; i < rows; i += ROWS) {
                const T *const from = x.at + i * x.row + k * x.column, *const panel = y.at + k * y.pitch + j;
                T* const to = c.at + i * c.pitch + j;
                const T* const begin = add || k ? to : zeros;
                (columns - j > LANES ? TILE_FOR(rows - i, wide) : TILE_FOR(rows - i, narrow))(
                    &run, 1, x.column, from, pitches, panel, begin, begin == to ? c.pitch : 0, to, c.pitch);
            }
    }
}

// -- what is read and written -----------------------------------------------------------------------------------------

typedef struct {  // matrices of all heads, in whatever memory they lie
    void* at;
    const Size* heads;  // where each begins
    Size row, column;
} Heads;

static inline Heads heads_of(const Word* a) { return (Heads){a[0].p, a[1].p, a[2].n, a[3].n}; }
static inline Size place(Heads x, Size head, Size row) { return x.heads[head] + row * x.row; }

// to = factor x, for `rows` rows from `first` on, with zeros up to whole tiles.
static void load(Block to, Heads x, Size head, Size first, Size rows, Size columns, T factor) {
    const T* const from = (const T*)x.at + place(x, head, first);
    const Size all = up(rows, UNIT);
    for (Size i = 0; i < all; i++) {
        T* const row = to.at + i * to.pitch;
        if (i >= rows) { EACH for (Size c = 0; c < to.pitch; c++) row[c] = 0; continue; }
        if (x.column == 1) EACH for (Size c = 0; c < columns; c++) row[c] = factor * from[i * x.row + c];
        else EACH for (Size c = 0; c < columns; c++) row[c] = factor * from[i * x.row + c * x.column];
        for (Size c = columns; c < to.pitch; c++) row[c] = 0;
    }
}

// The whole of a head as it lies there, if that fits and only one strip reads it; else a copy.
static Block loaded(Block copy, Heads x, Size head, Size rows, Size columns, bool once) {
    const bool whole_tiles = rows % SOME == 0 && columns % UNIT == 0;
    if (once && x.column == 1 && whole_tiles) return (Block){(T*)x.at + place(x, head, 0), x.row};
    load(copy, x, head, 0, rows, columns, 1);
    return copy;
}

// x = factor from, where the factors of rows are `step` apart
static void store(Heads x, Size head, Size first, Size rows, Size columns, Block from, const T* factor, int step) {
    T* const to = (T*)x.at + place(x, head, first);
    for (Size i = 0; i < rows; i++) {
        const T* const row = from.at + i * from.pitch;
        const T f = factor[i * step];
        if (x.column == 1) EACH for (Size c = 0; c < columns; c++) to[i * x.row + c] = f * row[c];
        else EACH for (Size c = 0; c < columns; c++) to[i * x.row + c * x.column] = f * row[c];
    }
}

static void transpose(Block to, Block from, Size rows, Size columns) {
    for (Size i = 0; i < rows; i++)
        for (Size c = 0; c < columns; c++) to.at[c * to.pitch + i] = from.at[i * from.pitch + c];
}

// A place in scratch.
static Block block(char** free, Size rows, Size columns) {
    const Block made = {(T*)*free, up(columns, UNIT)};
    *free += up(rows, UNIT) * made.pitch * sizeof(T);
    return made;
}

static inline Left plain(Block x) { return (Left){x.at, x.pitch, 1}; }
static inline Left transposed(Block x) { return (Left){x.at, 1, x.pitch}; }
static inline Block below(Block x, Size row) { return (Block){x.at + row * x.pitch, x.pitch}; }

// -- the scores of a strip --------------------------------------------------------------------------------------------

typedef struct {
    Heads q, k, v, seen, bias;  // the last two may be at 0
    T* total;
    Size s, t, d, e;  // queries, keys, features of both, features of values
    T scale;
    bool causal;
} Attention;

enum { WORDS = 27 };  // of a block of arguments

static Attention attention_of(const Word* a) {
    return (Attention){heads_of(a), heads_of(a + 4), heads_of(a + 8), heads_of(a + 12), heads_of(a + 16),
                       a[20].p, a[21].n, a[22].n, a[23].n, a[24].n, a[25].x, a[26].n};
}

typedef struct {
    Size head, first, rows, from, to;  // queries, and the keys that some of them see
    T hidden[QUERIES];  // the score of a key that a query does not see: 0 where it sees none at all, else -inf
} Strip;

static Strip strip_of(const Attention* x, Size head, Size first) {
    const Size rows = x->s - first < QUERIES ? x->s - first : QUERIES;
    Strip made = {head, first, rows, x->t, 0};
    for (Size i = 0; i < QUERIES; i++) made.hidden[i] = -INFINITY;
    for (Size i = 0; i < rows; i++) {
        const Size past = x->causal && first + i + 1 < x->t ? first + i + 1 : x->t;
        Size from = 0, to = past;
        if (x->seen.at) {
            const unsigned char* const seen = (unsigned char*)x->seen.at + place(x->seen, head, first + i);
            while (from < past && !seen[from * x->seen.column]) from++;
            while (to > from && !seen[(to - 1) * x->seen.column]) to--;
        }
        if (from == past) made.hidden[i] = 0, from = 0, to = x->t;
        if (from < made.from) made.from = from;
        if (to > made.to) made.to = to;
    }
    made.from -= made.from % SOME;  // whole tiles, as far as there are keys
    made.to = up(made.to, SOME) < x->t ? up(made.to, SOME) : x->t;
    return made;
}

// Bias and masks for the keys `from` to `to`. What is not the same for all queries lies the other way round, hence the
// small blocks.
static void hide(const Attention* x, const Strip* strip, Block scores, Size from, Size to) {
    const Heads seen = x->seen, bias = x->bias;
    const unsigned char* const sees = (unsigned char*)seen.at + (seen.at ? place(seen, strip->head, strip->first) : 0);
    const T* const added = (T*)bias.at + (bias.at ? place(bias, strip->head, strip->first) : 0);
    T* const at = scores.at - from * scores.pitch;
    for (Size start = from; start < to; start += UNIT) {
        const Size stop = start + UNIT < to ? start + UNIT : to;
        for (Size i = 0; i < strip->rows && bias.at; i++)
            for (Size j = start; j < stop; j++) at[j * scores.pitch + i] += added[i * bias.row + j * bias.column];
        for (Size i = 0; i < strip->rows && seen.at && seen.row; i++)
            for (Size j = start; j < stop; j++)
                if (!sees[i * seen.row + j * seen.column]) at[j * scores.pitch + i] = strip->hidden[i];
    }
    for (Size j = from; j < to; j++) {
        const bool all = seen.at && !seen.row && !sees[j * seen.column];
        const Size past = all ? strip->rows : x->causal ? j - strip->first : 0;
        const Size end = past < strip->rows ? past : strip->rows;
        EACH for (Size i = 0; i < end; i++) at[j * scores.pitch + i] = strip->hidden[i];
    }
}

// scores^T of the keys `from` to `to` of a strip, whose scaled queries lie transposed
static void scores_of(const Attention* x, const Strip* strip, Block k, Block q, Block scores, Size from, Size to) {
    product(plain(below(k, from)), q, scores, up(to - from, SOME), scores.pitch, x->d, false);
    hide(x, strip, scores, from, to);
}

// -- forward ----------------------------------------------------------------------------------------------------------

// The larger of each two numbers; a NaN stays. As a loop over an array it would be computed number by number.
static inline Vector larger(Vector a, Vector b) {
    typedef __typeof__(a >= b) Mask;
    const Mask first = (a >= b) | (a != a);
    return (Vector)(((Mask)a & first) | ((Mask)b & ~first));
}

// scores -> powers, the logarithm of their sum for each query, and its inverse
static void softmax(Block scores, Size keys, T* total, T* inverse) {
    for (Size c = 0; c < scores.pitch; c += LANES) {
        Vector highest = *(Vector*)(scores.at + c);
        for (Size j = 1; j < keys; j++) highest = larger(highest, *(Vector*)(scores.at + j * scores.pitch + c));
        T most[LANES], sum[LANES] = {0};
        for (int l = 0; l < LANES; l++) most[l] = highest[l];
        for (Size j = 0; j < keys; j++) {
            T* const row = scores.at + j * scores.pitch + c;
            EACH for (int l = 0; l < LANES; l++) {
                row[l] = exp(row[l] - most[l]);
                sum[l] += row[l];
            }
        }
        for (int l = 0; l < LANES; l++) total[c + l] = most[l] + log(sum[l]), inverse[c + l] = 1 / sum[l];
    }
}

// Jobs are the strips of all heads.
void attention(const Word* a, Size first, Size last, char* scratch) {
    const Attention x = attention_of(a);
    const Heads y = heads_of(a + WORDS);
    const Size strips = (x.s + QUERIES - 1) / QUERIES, most = x.s < QUERIES ? x.s : QUERIES;
    const Block k_copy = block(&scratch, x.t, x.d), v_copy = block(&scratch, x.t, x.e);
    Block k = k_copy, v = v_copy;
    const Block rows = block(&scratch, most, x.d > x.e ? x.d : x.e), q = block(&scratch, x.d, most);
    Block scores = block(&scratch, x.t, most);
    T total[QUERIES], inverse[QUERIES];
    for (Size job = first, present = -1; job < last; job++) {
        const Strip strip = strip_of(&x, job / strips, job % strips * QUERIES);
        if (strip.head != present) {
            present = strip.head;
            k = loaded(k_copy, x.k, present, x.t, x.d, strips == 1);
            v = loaded(v_copy, x.v, present, x.t, x.e, strips == 1);
        }
        const Size lanes = up(strip.rows, LANES), keys = strip.to - strip.from;
        const Block queries = {rows.at, up(x.d, UNIT)}, turned = {q.at, lanes}, result = {rows.at, up(x.e, UNIT)};
        scores.pitch = lanes;
        load(queries, x.q, strip.head, strip.first, strip.rows, x.d, x.scale);
        transpose(turned, queries, lanes, x.d);
        scores_of(&x, &strip, k, turned, scores, strip.from, strip.to);
        softmax(scores, keys, total, inverse);
        product(transposed(scores), below(v, strip.from), result, up(strip.rows, SOME), result.pitch, keys, false);
        store(y, strip.head, strip.first, strip.rows, x.e, result, inverse, 1);
        for (Size i = 0; i < strip.rows; i++) x.total[strip.head * x.s + strip.first + i] = total[i];
    }
}

// -- the gradient -----------------------------------------------------------------------------------------------------

enum { CHUNK = 256 };  // keys at a time, so that a strip's weights and slopes stay in the cache
#define LARGE 256  // a `total` beyond which its rounding shows in the weights

// scores -> weights; the slopes of the weights -> those of the scores
static void slopes_of(
    Block scores, Block slopes, Size keys, const T* total, const T* rest, const T* shift, const T* hidden) {
    for (Size c = 0; c < scores.pitch; c += LANES)
        for (Size j = 0; j < keys; j++) {
            T* const weights = scores.at + j * scores.pitch + c;
            T* const slope = slopes.at + j * slopes.pitch + c;
            EACH for (int l = 0; l < LANES; l++) {
                const T weight = exp(weights[l] - total[c + l] - rest[c + l]);
                weights[l] = weight;
                slope[l] = hidden[c + l] == 0 ? 0 : weight * (slope[l] - shift[c + l]);
            }
        }
}

// The sums over g y of each query.
static void shifts_of(Block g, Block y, Size rows, T* shift) {
    for (Size i = 0; i < rows; i++) {
        T sum[UNIT] = {0};
        for (Size c = 0; c < g.pitch; c += UNIT)
            EACH for (int l = 0; l < UNIT; l++) sum[l] += g.at[i * g.pitch + c + l] * y.at[i * y.pitch + c + l];
        for (int half = UNIT / 2; half; half /= 2)
            for (int l = 0; l < half; l++) sum[l] += sum[l + half];
        shift[i] = sum[0];
    }
}

typedef struct {
    Block k, v, dk, dv;  // of a head
    Block q, g, y, dq, turned_q, turned_g;  // of a strip
    Block scores, slopes;  // of a chunk of keys
    T total[QUERIES], rest[QUERIES], shift[QUERIES];  // the logarithm of a sum in two parts
} Work;

static Work work_of(const Attention* x, char* scratch) {
    const Size most = x->s < QUERIES ? x->s : QUERIES, chunk = x->t < CHUNK ? x->t : CHUNK, d = x->d, e = x->e;
    Work w = {block(&scratch, x->t, d), block(&scratch, x->t, e), block(&scratch, x->t, d), block(&scratch, x->t, e)};
    w.q = block(&scratch, most, d), w.dq = block(&scratch, most, d), w.turned_q = block(&scratch, d, most);
    w.g = block(&scratch, most, e), w.y = block(&scratch, most, e), w.turned_g = block(&scratch, e, most);
    w.scores = block(&scratch, chunk, most), w.slopes = block(&scratch, chunk, most);
    return w;
}

// What the rounding of `total` has left out: the logarithm of the number of keys, where a bias of -1e9 hides all.
static void add_rest(const Attention* x, const Strip* strip, Work* w) {
    T sum[QUERIES] = {0};
    for (Size from = strip->from; from < strip->to; from += CHUNK) {
        const Size keys = less(CHUNK, strip->to - from);
        scores_of(x, strip, w->k, w->turned_q, w->scores, from, from + keys);
        for (Size j = 0; j < keys; j++)
            for (Size i = 0; i < strip->rows; i++) sum[i] += exp(w->scores.at[j * w->scores.pitch + i] - w->total[i]);
    }
    for (Size i = 0; i < strip->rows; i++) w->rest[i] = log(sum[i]);
}

static void begin_strip(const Attention* x, const Strip* strip, Heads g, Heads y, Work* w) {
    const Size lanes = up(strip->rows, LANES), rows = strip->rows;
    w->scores.pitch = w->slopes.pitch = w->turned_q.pitch = w->turned_g.pitch = lanes;
    load(w->q, x->q, strip->head, strip->first, rows, x->d, x->scale);
    load(w->g, g, strip->head, strip->first, rows, x->e, 1);
    load(w->y, y, strip->head, strip->first, rows, x->e, 1);
    transpose(w->turned_q, w->q, lanes, x->d);
    transpose(w->turned_g, w->g, lanes, x->e);
    shifts_of(w->g, w->y, lanes, w->shift);
    const T* const total = x->total + strip->head * x->s + strip->first;
    bool large = false;
    for (Size i = 0; i < lanes; i++) {
        w->total[i] = i < rows ? total[i] : 0, w->rest[i] = 0;
        large |= fabs(w->total[i]) > LARGE;
    }
    if (large) add_rest(x, strip, w);
}

// What the keys `from` to `to` add to the gradients, of which that of the queries begins with the first keys.
static void chunk_dx(const Attention* x, const Strip* strip, Work* w, Size from, Size to) {
    const Size keys = to - from, rows = up(keys, SOME), lanes = w->scores.pitch;
    const Block dk = below(w->dk, from), dv = below(w->dv, from);
    scores_of(x, strip, w->k, w->turned_q, w->scores, from, to);
    product(plain(below(w->v, from)), w->turned_g, w->slopes, rows, lanes, x->e, false);
    slopes_of(w->scores, w->slopes, keys, w->total, w->rest, w->shift, strip->hidden);
    product(plain(w->scores), w->g, dv, rows, dv.pitch, lanes, true);
    product(plain(w->slopes), w->q, dk, rows, dk.pitch, lanes, true);
    const bool add = from > strip->from;
    product(transposed(w->slopes), below(w->k, from), w->dq, up(strip->rows, SOME), w->dq.pitch, keys, add);
}

// Jobs are heads.
void attention_dx(const Word* a, Size first, Size last, char* scratch) {
    const Attention x = attention_of(a);
    const Heads g = heads_of(a + WORDS), y = heads_of(a + WORDS + 4);
    const Heads dq = heads_of(a + WORDS + 8), dk = heads_of(a + WORDS + 12), dv = heads_of(a + WORDS + 16);
    const Work all = work_of(&x, scratch);
    Work w = all;
    const T one = 1;
    for (Size head = first; head < last; head++) {
        w.k = loaded(all.k, x.k, head, x.t, x.d, x.s <= QUERIES);
        w.v = loaded(all.v, x.v, head, x.t, x.e, x.s <= QUERIES);
        memset(w.dk.at, 0, up(x.t, UNIT) * w.dk.pitch * sizeof(T));
        memset(w.dv.at, 0, up(x.t, UNIT) * w.dv.pitch * sizeof(T));
        for (Size start = 0; start < x.s; start += QUERIES) {
            const Strip strip = strip_of(&x, head, start);
            begin_strip(&x, &strip, g, y, &w);
            for (Size from = strip.from; from < strip.to; from += CHUNK)
                chunk_dx(&x, &strip, &w, from, from + CHUNK < strip.to ? from + CHUNK : strip.to);
            store(dq, head, start, strip.rows, x.d, w.dq, &x.scale, 0);
        }
        store(dk, head, 0, x.t, x.d, w.dk, &one, 0);
        store(dv, head, 0, x.t, x.e, w.dv, &one, 0);
    }
}
