// An index of the n-grams of a text: where each stood last. It computes and stores what the numpy of
// `worker/drafts/ngram_index.py` does, which says what the numbers mean: ranks that find drafts by either find the same.

#include <stdint.h>

static const uint64_t MULTIPLIER = 0x9E3779B97F4A7C15u, MIX = 0xD6E8FEB86659FD93u;

typedef struct {
    const int32_t *text;
    int32_t *tables;         // [num_lengths, num_entries]: a place + 1
    const int64_t *lengths;  // ascending
    int64_t num_lengths, num_entries;
} Index;

static int32_t *entry_of(const Index *index, int64_t which, uint64_t hash, int64_t domain) {
    uint64_t mixed = (hash + (uint64_t)domain * MULTIPLIER) * MIX;
    return index->tables + which * index->num_entries + ((mixed ^ (mixed >> 32)) & (uint64_t)(index->num_entries - 1));
}

// Of the n-gram of each length that ends before the place `end` of a text that begins at `begin`.
static void hash_all(const Index *index, const int32_t *text, int64_t end, int64_t begin, uint64_t *hashes) {
    uint64_t sum = 0, power = 1;
    for (int64_t which = 0, back = 1; which < index->num_lengths; which++) {
        for (; back <= index->lengths[which]; back++) {
            power *= MULTIPLIER;
            int64_t token = end - back >= begin ? text[end - back] : -1;
            sum += (uint64_t)token * power;
        }
        hashes[which] = sum;
    }
}

enum { MOST_LENGTHS = 8 };

// Range i: those that end before the places firsts[i] to pasts[i].
void ngrams_add(
    const Index *index, int64_t n, const int64_t *begins, const int64_t *firsts, const int64_t *pasts,
    const int64_t *domains) {
    uint64_t hashes[MOST_LENGTHS];
    for (int64_t i = 0; i < n; i++)
        for (int64_t end = firsts[i]; end < pasts[i]; end++) {
            hash_all(index, index->text, end, begins[i], hashes);
            for (int64_t which = 0; which < index->num_lengths; which++)
                *entry_of(index, which, hashes[which], domains[i]) = (int32_t)(end + 1);
        }
}

// The queries are the ends of texts in `text`. owners NULL: found places are in the query's own text; else in one that
// begins at text_begins[place], if owners[place] is the query's domain.
void ngrams_find(
    const Index *index, const int32_t *text, int64_t n, const int64_t *ends, const int64_t *begins,
    const int64_t *domains, const int64_t *owners, const int64_t *text_begins, int64_t *places, int64_t *matched) {
    uint64_t hashes[MOST_LENGTHS];
    int64_t width = index->lengths[index->num_lengths - 1];
    for (int64_t i = 0; i < n; i++) {
        places[i] = -1;
        matched[i] = 0;
        hash_all(index, text, ends[i], begins[i], hashes);
        for (int64_t which = index->num_lengths - 1; which >= 0; which--) {
            int64_t place = (int64_t)*entry_of(index, which, hashes[which], domains[i]) - 1;
            if (place < 0) continue;
            if (owners ? owners[place] != domains[i] : place <= begins[i] || place >= ends[i]) continue;
            int64_t begin = owners ? text_begins[place] : begins[i], same = 0;
            while (same < width && place - same > begin && ends[i] - same > begins[i] &&
                   index->text[place - same - 1] == text[ends[i] - same - 1])
                same++;
            if (same < index->lengths[which]) continue;
            places[i] = place;
            matched[i] = same;
            break;
        }
    }
}
