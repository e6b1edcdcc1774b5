// Feeds any text to the readers of stored records. The first byte chooses the kind of the record,
// or that lines of the text become rows of a store, which is then opened.
//
// A row's line is: kind, name, number, place and record, with a space between them.
#include <sqlite3.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string>

#include "base/check.h"
#include "base/fields_json.h"
#include "base/log.h"
#include "coordinator/core/records.h"
#include "coordinator/store/store.h"
#include "coordinator/tokens/token_record.h"
#include "tests/support/fuzz_files.h"

namespace longhaul::coordinator {
namespace {

// An accepted record, written again, must be accepted with the same value.
template <class Kind>
void Read(const std::string& text) {
  Kind record, again;
  if (!FromJson(text, &record).empty() || !FaultIn(record).empty()) return;
  LH_CHECK(FromJson(ToJson(record, {.secrets = true}), &again).empty() && again == record);
}

// The file of a store without records.
struct Place {
  std::string path;
  std::string empty;  // its bytes
};
const Place& ThePlace() {
  static const auto& place = *new Place([] {
    Place made{FuzzDirectory() + "/store.db", ""};
    LH_CHECK(OpenSqliteStore(made.path).ok());
    std::ifstream file(made.path, std::ios::binary);
    made.empty.assign(std::istreambuf_iterator<char>(file), {});
    return made;
  }());
  return place;
}

void Open(const std::string& text) {
  const Place& place = ThePlace();
  for (const char* suffix : {"-wal", "-shm"}) unlink((place.path + suffix).c_str());
  std::ofstream(place.path, std::ios::binary | std::ios::trunc) << place.empty;
  sqlite3* db = nullptr;
  LH_CHECK(sqlite3_open(place.path.c_str(), &db) == SQLITE_OK);
  sqlite3_exec(db, "PRAGMA synchronous=OFF", nullptr, nullptr, nullptr);
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string kind, name, record;
    int64_t number = 0, at = 0;
    if (!(words >> kind >> name >> number >> at) || !std::getline(words, record)) continue;
    sqlite3_stmt* statement = nullptr;
    LH_CHECK(sqlite3_prepare_v2(db, "INSERT OR REPLACE INTO records VALUES(?,?,?,?,?)", -1,
                                &statement, nullptr) == SQLITE_OK);
    sqlite3_bind_text(statement, 1, kind.data(), static_cast<int>(kind.size()), SQLITE_STATIC);
    sqlite3_bind_text(statement, 2, name.data(), static_cast<int>(name.size()), SQLITE_STATIC);
    sqlite3_bind_int64(statement, 3, number);
    sqlite3_bind_int64(statement, 4, at);
    sqlite3_bind_text(statement, 5, record.data(), static_cast<int>(record.size()), SQLITE_STATIC);
    sqlite3_step(statement);  // what is no JSON is not taken
    sqlite3_finalize(statement);
  }
  sqlite3_close(db);
  auto store = OpenSqliteStore(place.path);
  if (!store.ok()) {
    LH_CHECK(!store.status().message().empty());
    return;
  }
  const auto records = (*store)->Load();
  LH_CHECK(records.ok() && (*store)->LoadTokens().ok()) << "opened, and cannot be read";
  // What was read can be written again.
  for (const auto& [key, group] : records->groups) {
    LH_CHECK((*store)->Apply({PutGroup{group}}).ok());
  }
  LH_CHECK(*(*store)->Load() == *records);
}

void One(uint8_t which, const std::string& text) {
  switch (which % 10) {
    case 0:
      return Read<StoreRecord>(text);
    case 1:
      return Read<RunRecord>(text);
    case 2:
      return Read<GroupRecord>(text);
    case 3:
      return Read<MemberRecord>(text);
    case 4:
      return Read<PeerRecord>(text);
    case 5:
      return Read<FatesRecord>(text);
    case 6:
      return Read<BlockedRecord>(text);
    case 7:
      return Read<DrainRecord>(text);
    case 8:
      return Read<Records>(text);
    case 9:
      return Open(text);
  }
}

}  // namespace
}  // namespace longhaul::coordinator

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  longhaul::SetLogSink([](std::string_view) {});
  longhaul::coordinator::One(data[0],
                             std::string(reinterpret_cast<const char*>(data) + 1, size - 1));
  return 0;
}
