#pragma once
#include "liger/functions/activation.h"
#include "liger/functions/distillation.h"
#include "liger/functions/embedding.h"
#include "liger/functions/experts.h"
#include "liger/functions/head.h"
#include "liger/functions/linear.h"
#include "liger/functions/loss.h"
#include "liger/functions/mixers.h"
#include "liger/functions/norm.h"
#include "liger/functions/optimizer.h"
#include "liger/functions/policy.h"
#include "liger/functions/preference.h"
#include "liger/functions/rope.h"
#include "liger/functions/router.h"
#include "liger/options.h"
#ifndef LIGER_NO_RESEARCH
#include "liger/research.h"
#endif

/// The operators as C++ functions, differentiable; a header of liger/functions for each family. Light headers: no
/// torch/nn.h.
