// The functions of paged_attention.cpp, which describes them.
#pragma once

#include "vectors.h"

extern "C" {

void paged_decode_attention(const Element* queries, const Element* key_cache, const Element* value_cache,
                            const int64_t* tables, const int64_t* contexts, const int64_t* members,
                            const int64_t* group_starts, const int64_t* shared, Element* outputs, int64_t num_sequences,
                            int64_t num_groups, int64_t table_width, int64_t page_size, int64_t num_kv_heads,
                            float scaling, int num_threads, int64_t window, int64_t chunk, float softcap,
                            const float* sinks);

void paged_chunk_attention(const Element* queries, const Element* key_cache, const Element* value_cache,
                           const int64_t* tables, const int64_t* first_rows, const int64_t* starts,
                           const int64_t* counts, Element* outputs, int64_t num_chunks, int64_t table_width,
                           int64_t page_size, int64_t num_kv_heads, float scaling, int num_threads, int64_t window,
                           int64_t chunk_size, float softcap, const float* sinks);
}
