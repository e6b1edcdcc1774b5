// Early return on absl::Status errors.
//
//   LH_RETURN_IF_ERROR(file.Sync());
//   LH_ASSIGN_OR_RETURN(const FrameHeader header, ParseFrameHeader(bytes, kind));
#pragma once

#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#define LH_MACRO_JOIN_INNER(a, b) a##b
#define LH_MACRO_JOIN(a, b) LH_MACRO_JOIN_INNER(a, b)

// Returns the status of `expression` from the enclosing function unless it is OK.
#define LH_RETURN_IF_ERROR(expression)                              \
  do {                                                              \
    if (::absl::Status lh_status = (expression); !lh_status.ok()) { \
      return lh_status;                                             \
    }                                                               \
  } while (false)

// Assigns the value of a StatusOr to `target`, which is a declaration or an existing variable. If
// the StatusOr has no value, returns its status from the enclosing function. A type with a comma in
// it needs parentheses or `auto`.
#define LH_ASSIGN_OR_RETURN(target, expression) \
  LH_ASSIGN_OR_RETURN_INNER(LH_MACRO_JOIN(lh_status_or_, __LINE__), target, expression)
#define LH_ASSIGN_OR_RETURN_INNER(result, target, expression) \
  auto result = (expression);                                 \
  if (!result.ok()) return std::move(result).status();        \
  target = *std::move(result)
