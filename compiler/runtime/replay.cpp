// Recorded native calls, made again in order: one call from Python for a whole graph or step.
//
// Arrays that the calls read hold addresses. Those of inputs, results, weights and optimizer state
// may differ from call to call: `Place` says which words hold them, and a word is written again only
// when its slot's address changed.
#include <cmath>
#include <cstdint>
#include <cstring>

using Int = int64_t;

enum Kind : Int { SEGMENT, TABLES, UPDATE, DENSE, EQUAL, STEPS };

struct Op {
  Int kind;
  void* function;
  Int arguments[6];
};

struct Place {
  Int* word;
  Int slot;
  Int offset;  // bytes from the slot's address
};

struct Tape {
  const Op* ops;
  Int count;
  const Place* places;  // ordered by slot
  Int place_count;
  Int* last;            // (slots,) the addresses that are written now
  Int slots;
  Int found[5];         // what the op that stopped the replay reported
};

// Tables whose optimizer counts its steps: the bias corrections of Adam, as Python computes them.
static void count_steps(float* const* steps, double* hypers, Int count) {
  for (Int f = 0; f < count; f++) {
    double* own = hypers + 7 * f;  // lr, eps, decay, two betas, two corrections
    *steps[f] += 1.0f;
    own[5] = 1 - std::pow(own[3], (double)*steps[f]);
    own[6] = 1 - std::pow(own[4], (double)*steps[f]);
  }
}

static void place(Tape& tape, const Int* addresses) {
  bool same = true;
  for (Int s = 0; s < tape.slots; s++) same &= tape.last[s] == addresses[s];
  if (same) return;
  for (Int k = 0; k < tape.place_count; k++) {
    const Place& one = tape.places[k];
    if (addresses[one.slot] != tape.last[one.slot]) *one.word = addresses[one.slot] + one.offset;
  }
  std::memcpy(tape.last, addresses, tape.slots * sizeof(Int));
}

// 0, or the number of the op, from 1, that reported a problem: what follows it was not done.
extern "C" __attribute__((visibility("default"))) Int replay(Tape* tape, const Int* addresses) {
  place(*tape, addresses);
  Int* found = tape->found;
  std::memset(found, 0, sizeof tape->found);
  for (Int k = 0; k < tape->count; k++) {
    const Op& op = tape->ops[k];
    const Int* a = op.arguments;
    switch (op.kind) {
      case SEGMENT:
        ((void (*)(Int, Int, Int, Int, Int*))op.function)(a[0], a[1], a[2], a[3], found);
        break;
      case TABLES:
        ((void (*)(Int, Int, Int, Int*))op.function)(a[0], a[1], a[2], found);
        break;
      case UPDATE:
        ((void (*)(Int, Int, Int, Int, Int*))op.function)(a[0], a[1], a[2], a[3], found);
        break;
      case DENSE:
        ((void (*)(Int, Int, Int, Int, Int))op.function)(a[0], a[1], a[2], a[3], a[4]);
        break;
      case EQUAL:  // an array of two addresses, and how many bytes must agree
        found[0] = std::memcmp(((void**)a[0])[0], ((void**)a[0])[1], a[1]) != 0;
        break;
      case STEPS:
        count_steps((float* const*)a[0], (double*)a[1], a[2]);
        break;
    }
    if (found[0]) return k + 1;
  }
  return 0;
}
