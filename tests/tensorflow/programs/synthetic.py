"""What Horovod's synthetic benchmark for TensorFlow 2 does with Horovod: a tape in a function."""

import argparse
import timeit

import tensorflow as tf

import kvdist.tensorflow as hvd  # import horovod.tensorflow as hvd

parser = argparse.ArgumentParser()
parser.add_argument("--fp16-allreduce", action="store_true")
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--num-batches-per-iter", type=int, default=4)
parser.add_argument("--num-iters", type=int, default=3)
args = parser.parse_args()

hvd.init()
tf.random.set_seed(1 + hvd.rank())  # for the test: the same numbers every time

model = tf.keras.Sequential(
    [
        tf.keras.Input((32, 32, 3)),
        tf.keras.layers.Conv2D(8, 3, strides=2, activation="relu"),
        tf.keras.layers.GlobalAveragePooling2D(),
        tf.keras.layers.Dense(10, activation="softmax"),
    ]
)
opt = tf.optimizers.SGD(0.01)
data = tf.random.uniform([args.batch_size, 32, 32, 3])
target = tf.random.uniform([args.batch_size, 1], minval=0, maxval=9, dtype=tf.int64)


@tf.function
def benchmark_step(first_batch):
    compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
    with tf.GradientTape() as tape:
        loss = tf.losses.sparse_categorical_crossentropy(target, model(data, training=True))
    tape = hvd.DistributedGradientTape(tape, compression=compression)
    gradients = tape.gradient(loss, model.trainable_variables)
    opt.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    if first_batch:
        hvd.broadcast_variables(model.variables, root_rank=0)
        hvd.broadcast_variables(opt.variables, root_rank=0)  # opt.variables()


with tf.device("CPU"):
    benchmark_step(first_batch=True)
    for number in range(args.num_iters):
        seconds = timeit.timeit(lambda: benchmark_step(first_batch=False), number=args.num_batches_per_iter)
        if hvd.rank() == 0:
            print(f"Iter #{number}: {args.batch_size * args.num_batches_per_iter / seconds:.1f} img/sec per CPU")

# For the test.
digest = sum(float(abs(array).sum()) for array in model.get_weights())
print(f"rank {hvd.rank()} of {hvd.size()}: steps {int(opt.iterations)}")
print(f"digest {digest!r}", flush=True)
