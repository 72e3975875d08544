// What has to hold of the values of arrays before a step goes on.

// Whether integers lie in 0 ... size - 1 and, where the last word says that they rise, begin with 0 and never fall; the
// word before counts how often they did not.
void in_range(const Word* a, long long first, long long last, char* scratch) {
    const T* const ids = a[0].p;
    const long long count = a[1].n, size = a[2].n;
    long long outside = a[4].n && (!count || ids[0]);
    for (long long k = 0; k < count; k++) outside += ids[k] < 0 || ids[k] >= size;
    for (long long k = 1; k < count && a[4].n; k++) outside += ids[k] < ids[k - 1];
    *(long long*)a[3].p = outside;
}
