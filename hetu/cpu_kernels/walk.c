// A step as a table: calls one after the other, the jobs of each divided among threads where that pays.

#include <stdlib.h>

typedef void Function(const Word* a, long long first, long long last, char* scratch);

typedef struct {
    Function* function;
    const Word* words;
    long long jobs, grain;
} Row;

// Make `count` calls. Each thread has `size` bytes of scratch.
void walk(const Row* table, long long count, long long size) {
    char* scratch = size ? aligned_alloc(64, (size + 63) / 64 * 64) : 0;
    for (const Row* row = table; row < table + count; row++) row->function(row->words, 0, row->jobs, scratch);
    free(scratch);
}
