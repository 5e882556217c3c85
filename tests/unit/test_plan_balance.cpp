// The fused form's items in two parts (plan/balance.hpp): what is walked, how often, when, and that nobody waits for ever.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "plan/balance.hpp"

namespace qla::plan {
namespace {

struct Piece {
  int64_t chunks;
  int64_t needs = -1, makes = -1;  // a border: begins with what lies there, leaves something there
};
struct Tape {
  std::vector<std::vector<Piece>> shares;
  int64_t share = 0, total = 0, longest = 0;
};

Tape tape_of(const std::vector<int64_t>& lengths, int64_t heads, int64_t multiprocessors) {
  Tape tape;
  for (const int64_t chunks : lengths) tape.total += chunks * heads, tape.longest = std::max(tape.longest, chunks);
  tape.share = balanced_share(tape.total, tape.longest, multiprocessors);
  const int64_t used = std::clamp<int64_t>((tape.total + tape.share - 1) / tape.share, 1, multiprocessors);
  tape.shares.resize(static_cast<size_t>(used));
  int64_t at = 0;
  for (const int64_t chunks : lengths)
    for (int64_t head = 0; head < heads; ++head, at += chunks) {
      const Parts parts = parts_of_item(at, static_cast<int32_t>(chunks), tape.share);
      EXPECT_EQ(parts.early + parts.late, chunks);
      const auto first = static_cast<size_t>(std::min<int64_t>(parts.share, used - 1));
      if (parts.early == 0) {
        tape.shares[first].push_back({chunks});
        continue;
      }
      EXPECT_GE(std::min(parts.early, parts.late), kLeastPart);
      EXPECT_LT(parts.share, used - 1);
      tape.shares[first].push_back({parts.late, parts.share, -1});
      EXPECT_TRUE(tape.shares[first + 1].empty());  // the early part is the first of its share: it waits for nothing
      tape.shares[first + 1].push_back({parts.early, -1, parts.share});
    }
  return tape;
}

// Chunks until all is done by so many CTAs, each with a share at a time, the last one first. -1: they wait for ever.
int64_t walk(const Tape& tape, int64_t ctas) {
  std::vector<int64_t> free_at(static_cast<size_t>(ctas), 0), made(tape.shares.size(), -1);
  int64_t end = 0;
  for (auto share = tape.shares.rbegin(); share != tape.shares.rend(); ++share) {
    int64_t& at = *std::min_element(free_at.begin(), free_at.end());
    for (const Piece& piece : *share) {
      if (piece.needs >= 0 && made[static_cast<size_t>(piece.needs)] < 0) return -1;  // of a share that nobody has taken yet
      if (piece.needs >= 0) at = std::max(at, made[static_cast<size_t>(piece.needs)]);
      at += piece.chunks;
      if (piece.makes >= 0) made[static_cast<size_t>(piece.makes)] = at;
    }
    end = std::max(end, at);
  }
  return end;
}

TEST(Balance, EqualItemsEndTogether) {
  for (const int64_t items : {133, 144, 160, 192, 200, 263, 264, 265, 320, 384, 512})
    for (const int64_t chunks : {1, 16, 32, 64, 128, 500}) {
      SCOPED_TRACE(std::to_string(items) + " items of " + std::to_string(chunks));
      const Tape tape = tape_of(std::vector<int64_t>(static_cast<size_t>(items), chunks), 1, 132);
      const int64_t end = walk(tape, 132);
      EXPECT_LE(end, tape.share + kLeastPart);
      EXPECT_GE(end, (tape.total + 131) / 132);
    }
  EXPECT_EQ(walk(tape_of(std::vector<int64_t>(8, 16), 24, 132), 132), 24);    // of two rounds of 16
  EXPECT_EQ(walk(tape_of(std::vector<int64_t>(4, 128), 48, 132), 132), 188);  // one more than the share: a part too short
  EXPECT_EQ(walk(tape_of(std::vector<int64_t>(3, 256), 48, 132), 132), 280);
}

TEST(Balance, AnyItemsByAnyNumberOfCtas) {
  std::mt19937_64 random(5);
  const auto pick = [&](int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(random); };
  for (int round = 0; round < 500; ++round) {
    std::vector<int64_t> lengths(static_cast<size_t>(pick(1, 40)));
    const int64_t most = pick(1, 600), heads = pick(1, 64), multiprocessors = pick(2, 140);
    for (int64_t& chunks : lengths) chunks = pick(0, 9) == 0 ? 0 : pick(1, most);
    const Tape tape = tape_of(lengths, heads, multiprocessors);
    EXPECT_GE(tape.share * multiprocessors, tape.total);
    EXPECT_GE(tape.share, tape.longest);
    int64_t walked = 0, pieces = 0;
    for (const auto& share : tape.shares) {
      int64_t of_share = 0;
      for (const Piece& piece : share) of_share += piece.chunks, ++pieces;
      EXPECT_LE(of_share, tape.share + kLeastPart);
      walked += of_share;
    }
    EXPECT_EQ(walked, tape.total);
    EXPECT_LT(pieces, static_cast<int64_t>(lengths.size()) * heads + multiprocessors);  // the list's room
    EXPECT_LE(walk(tape, multiprocessors), tape.share + kLeastPart);
    EXPECT_GE(walk(tape, multiprocessors), tape.longest);
    for (const int64_t ctas : {int64_t{1}, pick(1, multiprocessors)}) EXPECT_GE(walk(tape, ctas), 0);
  }
}

}  // namespace
}  // namespace qla::plan
