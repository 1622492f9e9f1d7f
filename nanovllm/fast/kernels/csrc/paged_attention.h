// Functions compiled for the sizes of a model's heads: of paged_attention.cpp and rotary.h, which describe them.
#pragma once

#include "norm.h"

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

void place_heads(const Norm* query_norm, const Norm* key_norm, int64_t num_heads, int64_t num_kv_heads,
                 const Element* qkv, int64_t qkv_size, const Element* cosines, const Element* sines,
                 const int64_t* slots, Element* key_cache, Element* value_cache, Element* queries, int64_t num_rows);
}
