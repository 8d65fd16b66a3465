// What the emulation refuses, as the devices do whose limits it has.
#include <gtest/gtest.h>
#include <stdexcept>
#include <utility>
#include "device.h"

namespace {

using liger::emulation::check_launch;
using liger::emulation::device_called;

TEST(Emulation, RefusesMoreSharedMemoryThanABlockGets) {
  for (const auto& [name, kib] : {std::pair("sm_80", 163), {"sm_89", 99}, {"sm_90", 227}, {"sm_120", 99}}) {
    const int most = kib * 1024;
    EXPECT_NO_THROW(check_launch(device_called(name), 256, most, 1)) << name;
    EXPECT_THROW(check_launch(device_called(name), 256, most + 1, 1), std::runtime_error) << name;
  }
}

TEST(Emulation, RefusesClustersWhereThereAreNone) {
  EXPECT_THROW(check_launch(device_called("sm_89"), 256, 0, 2), std::runtime_error);
  EXPECT_NO_THROW(check_launch(device_called("sm_120"), 256, 0, 8));
  EXPECT_THROW(check_launch(device_called("sm_120"), 256, 0, 16), std::runtime_error);
}

TEST(Emulation, RefusesBlocksOfMoreThreadsThanADeviceHas) {
  EXPECT_NO_THROW(check_launch(device_called("sm_90"), 1024, 0, 1));
  EXPECT_THROW(check_launch(device_called("sm_90"), 1025, 0, 1), std::runtime_error);
  EXPECT_THROW(check_launch(device_called("sm_90"), 0, 0, 1), std::runtime_error);
}

TEST(Emulation, KnowsItsDevices) { EXPECT_THROW(device_called("sm_91"), std::runtime_error); }

}  // namespace
