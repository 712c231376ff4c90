// What the engines' prefix caches are likely to hold: the prompts this router sent there,
// the least recently used forgotten where they exceed an engine's KV cache. An estimate;
// nothing an engine tells says what its cache holds.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

#include "table.h"

namespace calrouter {

class Prefixes {
 public:
  /// Prompts are told apart by chunks of so many tokens: a few of vLLM's blocks.
  static constexpr std::size_t kChunkTokens = 64;

  explicit Prefixes(std::size_t engines)
      : cached_tokens_(engines, 0), shelves_(engines) {}

  std::size_t engines() const { return shelves_.size(); }

  /// Of the prompt looked up last, tokens that an engine need not compute.
  std::int64_t cached_tokens(std::size_t rank) const { return cached_tokens_[rank]; }

  /// Chunks remembered of an engine.
  std::size_t chunks(std::size_t rank) const {
    return shelves_[checked(rank)].chunks;
  }

  /// Looks a prompt up. `salt` is one number for all else that caches tell apart.
  void look(const Table& table, std::uint64_t salt,
            const std::vector<std::int64_t>& prompt) {
    check(table);
    forget_matches();
    name_chunks(salt, prompt);
    // The last token is computed whatever is cached.
    const std::size_t usable = prompt.empty() ? 0 : (prompt.size() - 1) / kChunkTokens;
    for (std::size_t place = 0; place < usable; ++place)
      if (!match(table, place)) return;
  }

  /// The prompt looked up last goes to an engine: from now on it is in its cache.
  void keep(const Table& table, std::int64_t rank, double capacity_tokens) {
    check(table);
    Shelf& shelf = shelves_[checked(static_cast<std::size_t>(rank))];
    const auto holder = static_cast<std::uint32_t>(rank);
    renew(table, holder);
    // The end of a prompt is given up before its beginning, as in vLLM's own cache.
    for (std::size_t place = chain_.size(); place-- > 0;)
      put(shelf, holder, chain_[place]);
    const double most = capacity_tokens / static_cast<double>(kChunkTokens);
    while (static_cast<double>(shelf.chunks) > most) drop_oldest(shelf, holder);
    if (shelf.used.size() > 2 * shelf.chunks + kChunkTokens) compact(shelf, holder);
  }

  /// Forgets all: caches were emptied.
  void clear() {
    holders_.clear();
    for (Shelf& shelf : shelves_) shelf = Shelf{};
    forget_matches();
  }

 private:
  struct Holder {
    std::uint32_t rank;
    std::uint64_t stamp;  // of its last use
  };
  struct Use {
    std::uint64_t chunk;
    std::uint64_t stamp;
  };
  /// One engine's: uses in order, of which only a chunk's last counts.
  struct Shelf {
    std::int64_t incarnation = 0;
    std::size_t chunks = 0;
    std::deque<Use> used;
  };

  void check(const Table& table) const {
    if (table.engines() != engines())
      throw std::invalid_argument("prefixes of " + std::to_string(engines()) +
                                  " engines, a table of " +
                                  std::to_string(table.engines()));
  }

  std::size_t checked(std::size_t rank) const {
    if (rank >= shelves_.size())
      throw std::out_of_range("rank " + std::to_string(rank) + " of " +
                              std::to_string(shelves_.size()) + " engines");
    return rank;
  }

  void forget_matches() {
    for (const std::size_t rank : matched_) cached_tokens_[rank] = 0;
    matched_.clear();
  }

  /// A chunk's name stands for it and all before it. Each token is mixed in as
  /// splitmix64 does (Steele et al., "Fast splittable pseudorandom number generators",
  /// 2014), less its last round.
  void name_chunks(std::uint64_t salt, const std::vector<std::int64_t>& prompt) {
    chain_.clear();
    std::uint64_t name = salt;
    const std::size_t whole = prompt.size() / kChunkTokens * kChunkTokens;
    for (std::size_t i = 0; i < whole; ++i) {
      name += static_cast<std::uint64_t>(prompt[i]) + 0x9E3779B97F4A7C15ULL;
      name = (name ^ (name >> 30)) * 0xBF58476D1CE4E5B9ULL;
      name ^= name >> 27;
      if ((i + 1) % kChunkTokens == 0) chain_.push_back(name);
    }
  }

  /// Counts one more chunk for the engines that have it and all before it.
  bool match(const Table& table, std::size_t place) {
    const auto found = holders_.find(chain_[place]);
    if (found == holders_.end()) return false;
    const auto before = static_cast<std::int64_t>(place * kChunkTokens);
    bool any = false;
    for (const Holder& holder : found->second) {
      std::int64_t& cached = cached_tokens_[holder.rank];
      if (cached != before || !is_current(table, holder.rank)) continue;
      if (place == 0) matched_.push_back(holder.rank);
      cached += kChunkTokens;
      any = true;
    }
    return any;
  }

  bool is_current(const Table& table, std::size_t rank) const {
    return shelves_[rank].incarnation == table.engine_at(rank).message.incarnation;
  }

  /// An engine that was started anew has an empty cache.
  void renew(const Table& table, std::uint32_t rank) {
    if (is_current(table, rank)) return;
    while (shelves_[rank].chunks > 0) drop_oldest(shelves_[rank], rank);
    shelves_[rank].incarnation = table.engine_at(rank).message.incarnation;
  }

  void put(Shelf& shelf, std::uint32_t rank, std::uint64_t chunk) {
    std::vector<Holder>& holders = holders_[chunk];
    const std::uint64_t stamp = ++clock_;
    const auto mine = find(holders, rank);
    if (mine != holders.end()) {
      mine->stamp = stamp;
    } else {
      holders.push_back({rank, stamp});
      ++shelf.chunks;
    }
    shelf.used.push_back({chunk, stamp});
  }

  void drop_oldest(Shelf& shelf, std::uint32_t rank) {
    const Use use = shelf.used.front();
    shelf.used.pop_front();
    if (!is_last(use, rank)) return;
    std::vector<Holder>& holders = holders_[use.chunk];
    holders.erase(find(holders, rank));
    if (holders.empty()) holders_.erase(use.chunk);
    --shelf.chunks;
  }

  void compact(Shelf& shelf, std::uint32_t rank) {
    const auto stale = [&](const Use& use) { return !is_last(use, rank); };
    shelf.used.erase(std::remove_if(shelf.used.begin(), shelf.used.end(), stale),
                     shelf.used.end());
  }

  bool is_last(const Use& use, std::uint32_t rank) {
    const auto found = holders_.find(use.chunk);
    if (found == holders_.end()) return false;
    const auto mine = find(found->second, rank);
    return mine != found->second.end() && mine->stamp == use.stamp;
  }

  static std::vector<Holder>::iterator find(std::vector<Holder>& holders,
                                            std::uint32_t rank) {
    return std::find_if(holders.begin(), holders.end(),
                        [rank](const Holder& holder) { return holder.rank == rank; });
  }

  std::uint64_t clock_ = 0;
  std::unordered_map<std::uint64_t, std::vector<Holder>> holders_;
  std::vector<std::int64_t> cached_tokens_;
  std::vector<std::size_t> matched_;
  std::vector<std::uint64_t> chain_;
  std::vector<Shelf> shelves_;
};

}  // namespace calrouter
