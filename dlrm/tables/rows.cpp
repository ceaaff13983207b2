// Embedding rows in a file, with a set-associative cache of records in memory before it.
//
// A record is what belongs to one row: its numbers, then the optimizer's state for it, all f32. A
// batch's rows are gathered into a window (one tensor of rows, one for each part of the state) in
// the order of their ids, trained there, and put back. While a batch is trained, a second thread
// writes what the cache has pushed out and reads what the next batch will miss.

#include <fcntl.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <system_error>
#include <thread>
#include <vector>

using Int = int64_t;
#define EXPORT extern "C" __attribute__((visibility("default")))

static const Int WAYS = 8, READERS = 8;
static const Int MAGIC = 0x31676f4c6f646e55;  // "UndoLog1"

// ---- transfers ----------------------------------------------------------------------------------

static int read_one(int fd, char* to, Int size, Int at) {
  for (Int done = 0; done < size;) {
    const ssize_t got = pread(fd, to + done, size - done, at + done);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return got < 0 ? errno : EIO;
    done += got;
  }
  return 0;
}

static int write_one(int fd, const char* from, Int size, Int at) {
  for (Int done = 0; done < size;) {
    const ssize_t put = pwrite(fd, from + done, size - done, at + done);
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) return errno;
    done += put;
  }
  return 0;
}

struct Piece { int fd; Int at, size; char* to; };

// What the system has in memory is copied at once; the rest is asked for by several threads, since
// one that waits for each in turn would leave a disk idle.
static int read_all(std::vector<Piece>& pieces) {
  std::vector<Piece> slow;
  for (const Piece& p : pieces) {
#ifdef RWF_NOWAIT
    const iovec to{p.to, (size_t)p.size};
    if (preadv2(p.fd, &to, 1, p.at, RWF_NOWAIT) == p.size) continue;
#endif
    slow.push_back(p);
  }
  if (slow.empty()) return 0;
  std::atomic<int> error{0};
  std::atomic<size_t> next{0};
  const auto work = [&] {
    for (size_t k; (k = next++) < slow.size();)
      if (const int bad = read_one(slow[k].fd, slow[k].to, slow[k].size, slow[k].at)) error = bad;
  };
  std::vector<std::thread> threads;
  const size_t count = std::min<size_t>(READERS, (slow.size() + 7) / 8);
  try {
    for (size_t k = 1; k < count; k++) threads.emplace_back(work);
  } catch (const std::system_error&) {
  }  // no more threads to be had: those that there are do it
  work();
  for (std::thread& t : threads) t.join();
  return error;
}

// ---- a table ------------------------------------------------------------------------------------

struct Work {  // a batch's different ids, ascending, and what was read for those that missed
  std::vector<Int> ids;
  std::vector<Int> missed;  // places in ids
  std::vector<float> records;
};

struct Part { float* data; Int width; };  // a piece of the record, and the window's tensor for it

struct Table {
  int fd;
  Int rows, record, number;  // floats of a record; this table's number
  Int sets, ways, size = 0;
  std::vector<Int> tags, stamps;
  std::vector<uint8_t> dirty;
  std::vector<float> cached;
  std::vector<uint64_t> logged;  // one bit a row: whether this segment's log has it
  Work now, next;
  std::vector<Int> out;  // ids pushed out, not written yet
  std::vector<float> out_records;
  std::vector<std::pair<Int, Int>> out_index;  // the same sorted, made when it is asked for
  std::vector<Int> log_ids;
  std::vector<float> log_records;
  Int hits = 0, misses = 0;

  Int bytes() const { return record * (Int)sizeof(float); }
  Int set_of(Int id) const {
    if (ways == 1) return id;  // all rows have a place
    uint64_t x = (uint64_t)id * 0x9e3779b97f4a7c15u;
    return (Int)((unsigned __int128)x * (uint64_t)sets >> 64);
  }
  Int find(Int id) const {
    const Int first = set_of(id) * ways;
    for (Int k = first; k < first + ways; k++)
      if (tags[k] == id) return k;
    return -1;
  }
  Int find_out(Int id) {
    if (out_index.size() != out.size()) {
      out_index.clear();
      for (size_t k = 0; k < out.size(); k++) out_index.push_back({out[k], (Int)k});
      std::sort(out_index.begin(), out_index.end());
    }
    // the newest of several: a row may go out more than once before it is written
    auto at = std::upper_bound(out_index.begin(), out_index.end(), std::pair<Int, Int>(id, INT64_MAX));
    return at != out_index.begin() && (at - 1)->first == id ? (at - 1)->second : -1;
  }
  void push_out(Int id, const float* from) {
    out.push_back(id);
    out_records.insert(out_records.end(), from, from + record);
  }
};

EXPORT void* open_table(Int fd, Int number, Int rows, Int record, Int slots) {
  Table* t = new Table;
  t->fd = (int)fd, t->number = number, t->rows = rows, t->record = record;
  if (slots >= rows) t->sets = rows, t->ways = 1;
  else t->ways = WAYS, t->sets = std::max<Int>(1, slots / WAYS);
  const Int places = t->sets * t->ways;
  t->tags.assign(places, -1), t->stamps.assign(places, -1), t->dirty.assign(places, 0);
  t->cached.resize(places * record);
  t->logged.assign((rows + 63) / 64, 0);
  return t;
}

EXPORT void close_table(void* table) { delete (Table*)table; }

// ---- a batch ------------------------------------------------------------------------------------

static uint64_t digest(const char* bytes, Int size) {
  uint64_t x = 0x9e3779b97f4a7c15u ^ (uint64_t)size;
  for (Int k = 0; k < size; k += 4) {
    uint32_t word;
    std::memcpy(&word, bytes + k, 4);
    x = (x ^ word) * 0xff51afd7ed558ccdu;
    x ^= x >> 29;
  }
  return x;
}

EXPORT Int checksum(const char* bytes, Int size) { return (Int)digest(bytes, size); }

// Appends what `fetch` noted to the log: for each table a header, ids, old records.
static int write_log(Table** tables, Int count, int fd) {
  std::vector<char> text;
  for (Int f = 0; f < count; f++) {
    Table& t = *tables[f];
    const Int n = (Int)t.log_ids.size();
    if (n == 0) continue;
    const size_t start = text.size(), head = 5 * sizeof(Int);
    const size_t ids = n * sizeof(Int), records = n * t.bytes();
    text.resize(start + head + ids + records);
    std::memcpy(&text[start + head], t.log_ids.data(), ids);
    std::memcpy(&text[start + head + ids], t.log_records.data(), records);
    const Int fields[5] = {MAGIC, t.number, n, t.record,
                           (Int)digest(&text[start + head], (Int)(ids + records))};
    std::memcpy(&text[start], fields, head);
    t.log_ids.clear(), t.log_records.clear();
  }
  if (text.empty()) return 0;
  const Int end = lseek(fd, 0, SEEK_END);
  return end < 0 ? errno : write_one(fd, text.data(), (Int)text.size(), end);
}

// Writes what was pushed out, in the order of the file where it can be.
static int write_out(Table& t) {
  std::vector<std::pair<Int, Int>> order;
  for (size_t k = 0; k < t.out.size(); k++) order.push_back({t.out[k], (Int)k});
  std::sort(order.begin(), order.end());  // of the same row the newest comes last
  for (const auto& [id, k] : order)
    if (const int bad = write_one(t.fd, (const char*)&t.out_records[k * t.record], t.bytes(),
                                  id * t.bytes()))
      return bad;
  t.out.clear(), t.out_records.clear(), t.out_index.clear();
  return 0;
}

// The different ids of a batch (Work::ids) and, for each id given, its rank among them.
static void rank(Work& work, const Int* ids, Int n, Int* ranks) {
  std::vector<std::pair<Int, Int>> order(n);
  for (Int k = 0; k < n; k++) order[k] = {ids[k], k};
  std::sort(order.begin(), order.end());
  work.ids.clear();
  for (const auto& [id, k] : order) {
    if (work.ids.empty() || work.ids.back() != id) work.ids.push_back(id);
    ranks[k] = (Int)work.ids.size() - 1;
  }
}

// Writes the log and what was pushed out; ranks the next batch's ids, and reads what it will miss.
// ids and ranks lie table after table, `sizes` ids each. `stamp` is the next batch's number.
// Returns an errno; `counts` has the number of different ids of each table.
EXPORT Int prepare(Table** tables, Int count, Int log, const Int* ids, const Int* sizes, Int stamp,
                   Int* ranks, Int* counts) {
  if (const int bad = write_log(tables, count, (int)log)) return bad;
  std::vector<Piece> pieces;
  for (Int f = 0; f < count; f++) {
    Table& t = *tables[f];
    if (const int bad = write_out(t)) return bad;
    rank(t.next, ids, sizes[f], ranks);
    ids += sizes[f], ranks += sizes[f];
    counts[f] = (Int)t.next.ids.size();
    t.next.missed.clear();
    size_t at = 0;  // in the batch that is being trained: its rows will be put back
    for (Int k = 0; k < counts[f]; k++) {
      const Int id = t.next.ids[k];
      if (const Int slot = t.find(id); slot >= 0) {
        t.stamps[slot] = stamp;
        continue;
      }
      while (at < t.now.ids.size() && t.now.ids[at] < id) at++;
      if (at == t.now.ids.size() || t.now.ids[at] != id) t.next.missed.push_back(k);
    }
    t.next.records.resize(t.next.missed.size() * t.record);
    for (size_t m = 0; m < t.next.missed.size(); m++)
      pieces.push_back({t.fd, t.next.ids[t.next.missed[m]] * t.bytes(), t.bytes(),
                        (char*)&t.next.records[m * t.record]});
  }
  return read_all(pieces);
}

// Copies the rows of the prepared batch into the window. `parts` are of each table, `pieces` each.
// With `train` the old value of a row that the log does not have yet is noted for it.
EXPORT Int fetch(Table** tables, Int count, const Part* parts, Int pieces, Int train, Int threads) {
  std::atomic<int> error{0};
#pragma omp parallel for schedule(dynamic) num_threads(threads)
  for (Int f = 0; f < count; f++) {
    Table& t = *tables[f];
    std::swap(t.now, t.next);
    std::vector<float> late(t.record);
    size_t m = 0;
    for (Int k = 0; k < (Int)t.now.ids.size(); k++) {
      const Int id = t.now.ids[k];
      while (m < t.now.missed.size() && t.now.missed[m] < k) m++;
      const float* from;
      if (const Int slot = t.find(id); slot >= 0) {
        from = &t.cached[slot * t.record];
        t.hits++;
      } else if (m < t.now.missed.size() && t.now.missed[m] == k) {
        from = &t.now.records[m * t.record];
        t.misses++;
      } else if (const Int gone = t.find_out(id); gone >= 0) {
        from = &t.out_records[gone * t.record];
        t.hits++;
      } else {
        if (const int bad = read_one(t.fd, (char*)late.data(), t.bytes(), id * t.bytes()))
          error = bad;
        from = late.data();
        t.misses++;
      }
      if (train && !(t.logged[id / 64] >> (id % 64) & 1)) {
        t.logged[id / 64] |= (uint64_t)1 << (id % 64);
        t.log_ids.push_back(id);
        t.log_records.insert(t.log_records.end(), from, from + t.record);
      }
      for (Int p = 0; p < pieces; p++) {
        const Part& part = parts[f * pieces + p];
        std::memcpy(part.data + k * part.width, from, part.width * sizeof(float));
        from += part.width;
      }
    }
    if (!train) t.now.ids.clear();
  }
  return error;
}

// Puts the trained rows into the cache; what it has no room for, or pushes out, waits to be written.
// `stamp` is this batch's number: rows of it and of the next batch are not pushed out.
EXPORT void put_back(Table** tables, Int count, const Part* parts, Int pieces, Int stamp,
                     Int threads) {
#pragma omp parallel for schedule(dynamic) num_threads(threads)
  for (Int f = 0; f < count; f++) {
    Table& t = *tables[f];
    std::vector<float> whole(t.record);
    for (Int k = 0; k < (Int)t.now.ids.size(); k++) {
      const Int id = t.now.ids[k];
      float* to = whole.data();
      for (Int p = 0; p < pieces; p++) {
        const Part& part = parts[f * pieces + p];
        std::memcpy(to, part.data + k * part.width, part.width * sizeof(float));
        to += part.width;
      }
      Int slot = t.find(id);
      if (slot < 0) {
        const Int first = t.set_of(id) * t.ways;
        Int oldest = first;
        for (Int w = first; w < first + t.ways; w++)
          if (t.stamps[w] < t.stamps[oldest]) oldest = w;
        if (t.stamps[oldest] >= stamp) {
          t.push_out(id, whole.data());
          continue;
        }
        slot = oldest;
        if (t.tags[slot] >= 0 && t.dirty[slot]) t.push_out(t.tags[slot], &t.cached[slot * t.record]);
        t.tags[slot] = id, t.stamps[slot] = stamp;
      }
      t.stamps[slot] = std::max(t.stamps[slot], stamp);
      t.dirty[slot] = 1;
      std::memcpy(&t.cached[slot * t.record], whole.data(), t.bytes());
    }
    t.now.ids.clear();
  }
}

// Writes everything that the files do not have yet. Returns an errno.
EXPORT Int flush(Table** tables, Int count, Int log) {
  if (const int bad = write_log(tables, count, (int)log)) return bad;
  for (Int f = 0; f < count; f++) {
    Table& t = *tables[f];
    for (Int slot = 0; slot < t.sets * t.ways; slot++)
      if (t.dirty[slot]) t.push_out(t.tags[slot], &t.cached[slot * t.record]), t.dirty[slot] = 0;
    if (const int bad = write_out(t)) return bad;
  }
  return 0;
}

// From here on every change is new to the log.
EXPORT void begin_segment(Table** tables, Int count) {
  for (Int f = 0; f < count; f++)
    std::fill(tables[f]->logged.begin(), tables[f]->logged.end(), 0);
}

// Rows found in memory, and rows read from the disk, since the start.
EXPORT void totals(Table** tables, Int count, Int* hits, Int* misses) {
  *hits = *misses = 0;
  for (Int f = 0; f < count; f++) *hits += tables[f]->hits, *misses += tables[f]->misses;
}

// ---- pieces of one file -------------------------------------------------------------------------

EXPORT Int gather(Int fd, const Int* offsets, Int n, Int size, char* out) {
  std::vector<Piece> pieces;
  for (Int k = 0; k < n; k++) pieces.push_back({(int)fd, offsets[k], size, out + k * size});
  return read_all(pieces);
}

EXPORT Int scatter(Int fd, const Int* offsets, Int n, Int size, const char* data) {
  for (Int k = 0; k < n; k++)
    if (const int bad = write_one((int)fd, data + k * size, size, offsets[k])) return bad;
  return 0;
}
