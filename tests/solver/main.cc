// lh-shares: solves share problems (coordinator/solver/share_solver.h) that it reads from standard
// input.
//
//   hosts N          begins a problem with N hosts, of which nothing is known
//   host I UP DOWN   what a host can send and receive, in bytes per second; `inf` is allowed
//   pair I J RATE    what host I can send to host J; 0: nothing
//   solve ROUNDS     solves the problem that many times
//
// Prints one line for each `solve`: 1 or 0 (possible or not), the seconds per byte, the least
// microseconds of a round, and the shares (none: they are equal). Ends with exit code 2 at a line
// that it does not understand.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <limits>
#include <sstream>
#include <string>
#include <vector>

#include "coordinator/solver/share_solver.h"

namespace longhaul::coordinator {
namespace {

constexpr int kRoundsMax = 1000;

void SolveAndPrint(const ShareProblem& problem, int rounds) {
  ShareSolution found;
  double least_us = std::numeric_limits<double>::infinity();
  for (int round = 0; round < rounds; ++round) {
    const auto begin = std::chrono::steady_clock::now();
    found = SolveShares(problem);
    const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - begin;
    least_us = std::min(least_us, took.count());
  }
  printf("%d %.17g %.1f", found.possible, found.seconds_per_byte, least_us);
  for (const uint32_t share : found.shares) printf(" %u", share);
  printf("\n");
  fflush(stdout);
}

// Returns false if the line is wrong.
bool Obey(const std::string& line, ShareProblem* problem) {
  std::istringstream words(line);
  std::string what;
  words >> what;
  // Streams do not read "inf".
  std::vector<double> numbers;
  for (std::string word; words >> word;) {
    char* end = nullptr;
    numbers.push_back(std::strtod(word.c_str(), &end));
    if (*end != '\0') return false;
  }
  const auto is = [&](const char* name, size_t arguments) {
    return what == name && numbers.size() == arguments;
  };
  const auto is_host = [&](double number) {
    return number >= 0 && number < static_cast<double>(problem->hosts());
  };
  if (is("hosts", 1) && numbers[0] >= 1 && numbers[0] <= kShareHostsMax) {
    *problem = ShareProblem(static_cast<size_t>(numbers[0]));
  } else if (is("host", 3) && is_host(numbers[0]) && numbers[1] > 0 && numbers[2] > 0) {
    problem->SetHost(static_cast<size_t>(numbers[0]), numbers[1], numbers[2]);
  } else if (is("pair", 3) && is_host(numbers[0]) && is_host(numbers[1]) &&
             numbers[0] != numbers[1] && numbers[2] >= 0) {
    problem->SetPair(static_cast<size_t>(numbers[0]), static_cast<size_t>(numbers[1]), numbers[2]);
  } else if (is("solve", 1) && numbers[0] >= 1 && numbers[0] <= kRoundsMax) {
    SolveAndPrint(*problem, static_cast<int>(numbers[0]));
  } else {
    return false;
  }
  return true;
}

int Main() {
  ShareProblem problem(1);
  for (std::string line; std::getline(std::cin, line);) {
    if (!Obey(line, &problem)) {
      fprintf(stderr, "lh-shares: what is `%s`?\n", line.c_str());
      return 2;
    }
  }
  return 0;
}

}  // namespace
}  // namespace longhaul::coordinator

int main() { return longhaul::coordinator::Main(); }
