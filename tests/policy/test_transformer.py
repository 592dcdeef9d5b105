"""The transformer against transformers' own models, and against itself."""

import dataclasses
import functools

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from tepo_jax.policy import transformer
from tepo_jax.policy import weights
from tepo_jax.runtime import mesh as mesh_lib

from . import conftest
