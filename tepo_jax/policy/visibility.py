"""Which keys a query sees: see `attention`.

Axes: B completions, S query slots, T key slots.
"""

# A hidden key's score: finite, so that a query without a visible key (padding)
# is not NaN, nor its gradient.
HIDDEN = -1e30


def visible(query_position_BS, key_position_BT, window=None,
            query_segment_BS=None, key_segment_BT=None):
  """The visibility rule: bool [B, S, T]."""
  query_BS1 = query_position_BS[:, :, None]
  key_B1T = key_position_BT[:, None, :]
  visible_BST = (key_B1T >= 0) & (key_B1T <= query_BS1)
  if window is not None:
    visible_BST &= key_B1T > query_BS1 - window
  if query_segment_BS is not None:
    visible_BST &= query_segment_BS[:, :, None] == key_segment_BT[:, None, :]
  return visible_BST
