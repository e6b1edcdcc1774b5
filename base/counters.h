// The counters that /metrics shows.
//
// Each part of the daemon counts in a plain struct. Beside the struct stands a list that gives a
// name and a help text to each count. The page of /metrics is made from these lists, so a counter
// is described in one place.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace longhaul {

// One field of a struct of counts.
template <class Counts>
struct Counter {
  const char* name;  // "longhaul_<part>_<thing>_total"
  const char* help;
  uint64_t Counts::*count;
};

// The value of a counter when the page is made.
struct CounterTotal {
  const char* name;
  const char* help;
  uint64_t total = 0;       // the count of one part; several parts may use the same name
  const char* reason = "";  // the value of the label "reason"; "": the counter has no label
};

// Appends the present value of each counter in the list.
template <class Counts, size_t kSize>
void AddTotals(const Counter<Counts> (&counters)[kSize], const Counts& counts,
               std::vector<CounterTotal>* totals) {
  for (const Counter<Counts>& counter : counters) {
    totals->push_back({counter.name, counter.help, counts.*counter.count});
  }
}

}  // namespace longhaul
