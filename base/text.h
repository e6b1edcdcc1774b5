// Foreign text: what other parties say, in logs and on terminals.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace longhaul {

// The first character of a text in UTF-8.
struct Character {
  size_t bytes = 0;  // 0: the text does not begin with a valid character
  // Whether it may be shown. A control character (U+0000 to U+001F, U+007F to U+009F) may steer a
  // terminal. One that separates lines or sets the direction of writing may make a line look like
  // another one (https://trojansource.codes).
  bool shown = false;
};
// `text`: not empty.
Character FirstCharacter(std::string_view text);

// Gives " key=value", a field of a line in the log. The value is quoted if it is empty, or contains
// a blank, a quote, a backslash or a control character. Every value that does not come from code
// goes through here: unquoted, it could bring fields of its own.
std::string LogField(std::string_view key, std::string_view value);

}  // namespace longhaul
