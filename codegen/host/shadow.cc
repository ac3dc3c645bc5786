#include "shadow.h"

namespace host {

// Calls `f` for each cell, and how many bytes it stands for, until it says stop. A word that is
// touched in part becomes four cells.
template <class F>
bool Shadow::each(std::size_t offset, int bytes, F f) {
  const std::size_t end = offset + bytes;
  for (std::size_t word = offset / 4; word * 4 < end; ++word) {
    Cell& cell = cells_[word];
    const bool whole = offset <= word * 4 && word * 4 + 4 <= end;
    if (cell.bytes < 0 && whole) {
      if (!f(cell, 4)) return false;
      continue;
    }
    if (cell.bytes < 0) {
      std::array<Cell, 4> four{cell, cell, cell, cell};
      for (Cell& each : four) {
        if (cell.more < 0) continue;
        readers_.push_back(readers_[cell.more]);
        each.more = readers_.size() - 1;
      }
      split_.push_back(four);
      cell.bytes = split_.size() - 1;
    }
    for (std::size_t i = word * 4; i < word * 4 + 4; ++i)
      if (offset <= i && i < end && !f(split_[cell.bytes][i % 4], 1)) return false;
  }
  return true;
}

Conflict Shadow::check(std::size_t offset, int bytes, const Access& access) {
  Conflict found;
  each(offset, bytes, [&](Cell& cell, int) {
    found = check(cell, access);
    return found.what == nullptr;
  });
  return found;
}

Conflict Shadow::check(Cell& cell, const Access& access) {
  const Event& who = access.who;
  Clocks& clocks = *access.clocks;
  const bool reads = access.kind == Kind::READ || access.kind == Kind::ASYNC_READ;
  const bool async = access.kind == Kind::ASYNC_READ || access.kind == Kind::ASYNC_WRITE;
  const Event& write = cell.write;
  // A bulk copy that has happened is there for the next write; a thread's store needs a release.
  const auto arrived = [&](const Event& write) {
    const u32 known = write.async && !reads ? clocks.done(write.agent) : clocks.seen(write.agent);
    return known >= write.clock;
  };
  if (cell.under_way) return {"an asynchronous copy that is under way", {0, 0, 0, cell.under_way}};
  if (write.clock == 0) {
    if (reads && !access.unwritten) return {"nobody wrote it", {}};
  } else if (write.cluster != who.cluster || !arrived(write)) {
    return {"no barrier orders it after the write", write};
  } else if (async && !write.async && clocks.fenced(write.agent) < write.clock) {
    return {"no fence.proxy.async comes after the write", write};
  }
  const auto ordered = [&](const Event& read) {
    return read.cluster == who.cluster && clocks.done(read.agent) >= read.clock;
  };
  if (reads) {
    const auto replaces = [&](const Event& read) {
      return read.clock == 0 || ordered(read) ||
             (read.agent == who.agent && read.cluster == who.cluster);
    };
    if (replaces(cell.read)) {
      cell.read = who;
      return {};
    }
    if (cell.more < 0) {
      readers_.emplace_back();
      cell.more = readers_.size() - 1;
    }
    for (Event& read : readers_[cell.more])
      if (replaces(read)) {
        read = who;
        return {};
      }
    readers_[cell.more].push_back(who);
    return {};
  }
  if (cell.read.clock != 0 && !ordered(cell.read))
    return {"no barrier orders it after the read", cell.read};
  if (cell.more >= 0) {
    for (const Event& read : readers_[cell.more])
      if (!ordered(read)) return {"no barrier orders it after the read", read};
    readers_[cell.more].clear();
  }
  cell.read = {};
  if (access.starts_copy) {
    cell.under_way = who.pc;
  } else {
    cell.write = who;
  }
  return {};
}

std::vector<bool> Shadow::written_by(std::size_t offset, int bytes, const Event& who) {
  std::vector<bool> by;
  each(offset, bytes, [&](Cell& cell, int count) {
    const Event& write = cell.write;
    const bool same = write.agent == who.agent && write.cluster == who.cluster;
    by.insert(by.end(), count, same && write.clock != 0);
    return true;
  });
  return by;
}

void Shadow::land(std::size_t offset, int bytes, const Event& who) {
  each(offset, bytes, [&](Cell& cell, int) {
    cell.under_way = nullptr;
    cell.write = who;
    return true;
  });
}

}  // namespace host
