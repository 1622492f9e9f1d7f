// RMS norm of a row.
#pragma once

#include "vectors.h"

namespace {

struct Norm {
  const Element* weight;
  float epsilon;
};

// Rounds as `transformers`: first the normed value, then its product with the weight. Sixteen neighbours from element
// k on are written to place(k).
template <class Place>
void normalize(const Norm& norm, const Element* from, int64_t depth, const Place& place) {
  Floats squares = {};
  for (int64_t at = 0; at < depth; at += kLanes) squares += load(from + at) * load(from + at);
  const float scale = 1.0f / std::sqrt(sum(squares) / (float)depth + norm.epsilon);
  for (int64_t at = 0; at < depth; at += kLanes) {
    Element rounded[kLanes];
    store(rounded, load(from + at) * scale);
    store(place(at), load(rounded) * load(norm.weight + at));
  }
}

}  // namespace
