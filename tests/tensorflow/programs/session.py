"""The session script of Horovod's first readme, for kvdist and today's TensorFlow; lines that differ are marked."""

import sys

import tensorflow.compat.v1 as tf  # import tensorflow as tf
from sklearn.datasets import load_digits

import kvdist.tensorflow as hvd  # import horovod.tensorflow as hvd

tf.disable_v2_behavior()  # sessions are not the default any more

# Initialize Horovod
hvd.init()
tf.set_random_seed(1 + hvd.rank())  # for the test: the same numbers every time

# Pin GPU to be used to process local rank (one GPU per process)
config = tf.ConfigProto()
config.gpu_options.visible_device_list = str(hvd.local_rank())

# Build model...
data, target = load_digits(return_X_y=True)
images, labels = tf.data.make_one_shot_iterator(
    tf.data.Dataset.from_tensor_slices((data.astype("float32") / 16, target)).shuffle(2000).repeat().batch(64)
).get_next()
weights = tf.get_variable("weights", initializer=tf.random.normal([64, 10], seed=hvd.rank()))
logits = tf.matmul(images, weights)
loss = tf.losses.sparse_softmax_cross_entropy(labels, logits)
opt = tf.train.AdagradOptimizer(0.01 * hvd.size())

# Add Horovod Distributed Optimizer
opt = hvd.DistributedOptimizer(opt)

# Add hook to broadcast variables from rank 0 to all other processes during
# initialization.
hooks = [hvd.BroadcastGlobalVariablesHook(0)]

# Make training operation
step = tf.train.get_or_create_global_step()
train_op = opt.minimize(loss, global_step=step)
hooks.append(tf.train.StopAtStepHook(last_step=int(sys.argv[1])))  # the loop of the readme never ends

# The MonitoredTrainingSession takes care of session initialization,
# restoring from a checkpoint, saving to a checkpoint, and closing when done
# or an error occurs.
checkpoint_dir = sys.argv[2] if hvd.rank() == 0 else None  # rank 0 writes checkpoints, and all have what it restores
with tf.train.MonitoredTrainingSession(checkpoint_dir=checkpoint_dir, config=config, hooks=hooks) as mon_sess:
    begins_at, losses = mon_sess.run(step), []
    while not mon_sess.should_stop():
        # Perform synchronous training.
        _, value, now = mon_sess.run([train_op, loss, weights])
        losses.append(value)

# For the test.
print(f"rank {hvd.rank()} of {hvd.size()}: loss {value:.6f} first {losses[0]:.6f} began {begins_at}")
print(f"digest {float(abs(now).sum())!r}", flush=True)
