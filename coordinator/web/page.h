// The status page, which the build makes from page.html (embed_page.py).
#pragma once

namespace longhaul::coordinator {

extern const char kPageHtml[];
// The Content-Security-Policy of the page. It allows the page's own style and script by their
// hashes, connections to the server that sent the page, and nothing else.
extern const char kPagePolicy[];

}  // namespace longhaul::coordinator
