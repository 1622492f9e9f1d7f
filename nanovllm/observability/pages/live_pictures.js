// ------------------------------------------------------------------------------------------- pictures of a question

/** Pictures as data URLs, which the page shows small and the next question sends. */
class PictureTray {
  constructor({ box, input, button, question }) {
    Object.assign(this, { box, input, urls: [] });
    button.addEventListener("click", () => input.click());
    input.addEventListener("change", () => this.read(input.files).then(() => { input.value = ""; }));
    question.addEventListener("paste", (event) => { if (!button.hidden) this.read(event.clipboardData.files); });
  }

  async read(files) {
    const pictures = [...files].filter(({ type }) => type.startsWith("image/"));
    this.put([...this.urls, ...await Promise.all(pictures.map(dataUrl))]);
  }

  /** Hold these pictures alone; a click on one removes it. */
  put(urls = []) {
    this.urls = urls;
    this.box.replaceChildren(...urls.map((url, place) => {
      const remove = element("button", "quiet");
      remove.type = "button";
      remove.setAttribute("aria-label", `Remove picture ${place + 1}`);
      remove.append(thumbnail(url, place));
      remove.addEventListener("click", () => this.put(this.urls.filter((_, other) => other !== place)));
      return remove;
    }));
  }
}

function thumbnail(url, place) {
  const picture = element("img", "thumbnail");
  picture.src = url;
  picture.alt = `Picture ${place + 1}`;
  return picture;
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.addEventListener("load", () => resolve(reader.result));
    reader.addEventListener("error", () => reject(reader.error));
    reader.readAsDataURL(file);
  });
}

/** A message's content in the format of /v1/chat/completions. */
function contentOf({ content, pictures = [] }) {
  const parts = pictures.map((url) => ({ type: "image_url", image_url: { url } }));
  return parts.length ? [...parts, { type: "text", text: content }] : content;
}
