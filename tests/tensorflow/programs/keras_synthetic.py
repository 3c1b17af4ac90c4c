"""What Horovod's synthetic benchmark for Keras in TensorFlow 2 does with Horovod: `model.fit`, timed by a callback."""

import argparse
from timeit import default_timer as timer

import tensorflow as tf

import kvdist.tensorflow.keras as hvd  # import horovod.tensorflow.keras as hvd

parser = argparse.ArgumentParser()
parser.add_argument("--fp16-allreduce", action="store_true")
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--num-batches-per-iter", type=int, default=4)
parser.add_argument("--num-iters", type=int, default=3)
args = parser.parse_args()

hvd.init()
tf.random.set_seed(1 + hvd.rank())  # for the test: the same numbers every time

device_name = "XPU" if hvd.sycl_built() else "GPU"
for gpu in tf.config.experimental.list_physical_devices(device_name):
    tf.config.experimental.set_memory_growth(gpu, True)

model = tf.keras.Sequential(
    [
        tf.keras.Input((32, 32, 3)),
        tf.keras.layers.Conv2D(8, 3, strides=2, activation="relu"),
        tf.keras.layers.GlobalAveragePooling2D(),
        tf.keras.layers.Dense(10, activation="softmax"),
    ]
)
data = tf.random.uniform([args.batch_size, 32, 32, 3])
target = tf.random.uniform([args.batch_size, 1], minval=0, maxval=9, dtype=tf.int64)
dataset = tf.data.Dataset.from_tensor_slices((data, target)).cache().repeat().batch(args.batch_size)

compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
opt = hvd.DistributedOptimizer(tf.optimizers.SGD(0.01), compression=compression)
model.compile(
    loss=tf.losses.SparseCategoricalCrossentropy(),
    optimizer=opt,
    jit_compile=False,  # experimental_run_tf_function=False
)


class TimingCallback(tf.keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        self.began = timer()

    def on_epoch_end(self, epoch, logs=None):
        rate = args.batch_size * args.num_batches_per_iter / (timer() - self.began)
        print(f"Iter #{epoch}: {rate:.1f} img/sec per CPU")


callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
if hvd.rank() == 0:
    callbacks.append(TimingCallback())
history = model.fit(
    dataset,
    batch_size=args.batch_size,
    steps_per_epoch=args.num_batches_per_iter,
    callbacks=callbacks,
    epochs=args.num_iters,
    verbose=0,
).history

# For the test.
digest = sum(float(abs(array).sum()) for array in model.get_weights())
print(f"rank {hvd.rank()} of {hvd.size()}: loss {history['loss'][-1]:.6f} steps {int(opt.iterations)}")
print(f"digest {digest!r}", flush=True)
